// The ABI version, so that a library of another release is refused at load.
#include "abi.h"

XDS_API uint32_t xds_abi_version(void) { return 1; }
