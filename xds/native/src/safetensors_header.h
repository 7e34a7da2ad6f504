// Parse and validate the JSON header of a safetensors file. Layer: native; includes nothing of ours but abi.h.
#pragma once
#include "abi.h"

// What xds_safetensors_parse found. All pointers belong to it until xds_safetensors_free.
// Tensors are in file order: sorted by (begin, end, name).
struct xds_safetensors_header {
    uint64_t count;                // tensors
    const uint64_t* begin;         // [count], bytes from the start of the data section
    const uint64_t* end;           // [count]
    const uint64_t* shape_offset;  // [count], index into shapes of the first dimension
    const uint64_t* name_offset;   // [count], bytes into names
    const uint64_t* name_nbytes;   // [count]
    const uint8_t* dtype;          // [count], index into the list of data types (xds.checkpoint.safetensors.DTYPES)
    const uint8_t* ndim;           // [count]
    const uint64_t* shapes;        // [shapes_count]
    uint64_t shapes_count;
    const char* names;             // UTF-8, a line feed between two names
    uint64_t names_nbytes;
    const char* metadata;          // keys and values one after the other, UTF-8
    const uint64_t* metadata_end;  // [2 * metadata_pairs], where each key or value ends in metadata
    uint64_t metadata_pairs;
    const char* error;             // NUL-terminated UTF-8, empty if all is well
    void* owner;
};

enum xds_safetensors_status {
    XDS_SAFETENSORS_OK = 0,
    XDS_SAFETENSORS_INVALID = 1,
    XDS_SAFETENSORS_TRUNCATED = 2,
    XDS_SAFETENSORS_NO_MEMORY = 3,
};

// json[0..json_nbytes) is the header without its eight length bytes; data_nbytes is file size - 8 - json_nbytes.
// Returns a status; *out is filled in every case (on an error: only `error`) and must be freed.
XDS_API int xds_safetensors_parse(const char* json, uint64_t json_nbytes, uint64_t data_nbytes,
                                  xds_safetensors_header* out);
XDS_API void xds_safetensors_free(xds_safetensors_header* header);
