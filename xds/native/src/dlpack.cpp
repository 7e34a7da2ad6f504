// Many DLPack capsules over one block of memory, in one call. Layer: native; links no Python.
//
// Python's functions come as addresses, so that this library serves every Python. The structures are those of the
// DLPack specification (dlpack.h, unversioned managed tensors, capsules called "dltensor").
#include <atomic>
#include <memory>
#include <new>
#include <vector>

#include "abi.h"

// Functions of Python's stable ABI, in the order of xds.interop.dlpack._Python.
struct xds_dlpack_python {
    void* (*list_new)(intptr_t);
    int (*list_set_item)(void*, intptr_t, void*);  // takes over the item, whatever happens
    void* (*capsule_new)(void*, const char*, void (*)(void*));
    int (*capsule_is_valid)(void*, const char*);
    void* (*capsule_pointer)(void*, const char*);
    void (*incref)(void*);
    void (*decref)(void*);
    int (*is_initialized)();
    int (*gil_ensure)();
    void (*gil_release)(int);
    void* none;
};

namespace {

constexpr char kName[] = "dltensor";

struct DataType {
    uint8_t code, bits;
    uint16_t lanes;
};
struct Tensor {
    void* data;
    int32_t device_type, device_id;
    int32_t ndim;
    DataType dtype;
    int64_t* shape;
    int64_t* strides;
    uint64_t byte_offset;
};
struct ManagedTensor {
    Tensor tensor;
    void* context;
    void (*deleter)(ManagedTensor*);
};
static_assert(sizeof(ManagedTensor) == 64);

// All tensors of a block; the owner of the memory is let go with the last of them.
struct Group {
    xds_dlpack_python python;
    void* owner;
    std::atomic<uint64_t> left{1};
    std::vector<ManagedTensor> tensors;
    std::vector<int64_t> dims;  // shape and strides of each tensor
};

void drop(Group* group) {
    if (group->left.fetch_sub(1, std::memory_order_acq_rel) != 1) return;
    // Tensors kept to the very end may die after the interpreter; the process is ending then.
    if (group->python.is_initialized()) {
        int state = group->python.gil_ensure();
        group->python.decref(group->owner);
        group->python.gil_release(state);
    }
    delete group;
}

void delete_tensor(ManagedTensor* tensor) { drop(static_cast<Group*>(tensor->context)); }

// A consumer renames the capsule and takes the tensor over; only one that nobody consumed is ours to delete. Capsules
// carry no context, hence the functions are kept here: they are the same for every call of a process.
xds_dlpack_python process_python;

void destroy_capsule(void* capsule) {
    if (!process_python.capsule_is_valid(capsule, kName)) return;
    auto* tensor = static_cast<ManagedTensor*>(process_python.capsule_pointer(capsule, kName));
    tensor->deleter(tensor);
}

}  // namespace

// A new list of `count` capsules, None where types[dtype] is 0; else types holds code, bits << 8, lanes << 16.
// Called with the interpreter lock held. NULL: no memory.
XDS_API void* xds_dlpack_capsules(const xds_dlpack_python* python, void* owner, uint64_t address, int32_t device_type,
                                  int32_t device_id, uint64_t count, const uint64_t* offset, const uint8_t* dtype,
                                  const uint8_t* ndim, const uint64_t* shape_offset, const uint64_t* shapes,
                                  const uint32_t* types) {
    process_python = *python;
    std::unique_ptr<Group> holder(new (std::nothrow) Group{*python, owner, {1}, {}, {}});
    if (!holder) return nullptr;
    try {
        holder->tensors.resize(count);
        size_t dims = 0;
        for (uint64_t i = 0; i < count; ++i) dims += 2u * ndim[i];
        holder->dims.resize(dims);
    } catch (const std::bad_alloc&) {
        return nullptr;
    }
    void* list = python->list_new(static_cast<intptr_t>(count));
    if (!list) return nullptr;
    Group* group = holder.release();
    python->incref(owner);
    int64_t* dim = group->dims.data();
    bool failed = false;
    for (uint64_t i = 0; i < count && !failed; ++i) {
        uint32_t type = types[dtype[i]];
        if (type == 0) {
            python->incref(python->none);
            failed = python->list_set_item(list, static_cast<intptr_t>(i), python->none) != 0;
            continue;
        }
        int64_t* shape = dim;
        int64_t* strides = dim + ndim[i];
        dim += 2 * ndim[i];
        int64_t stride = 1;
        for (unsigned axis = ndim[i]; axis-- > 0;) {
            shape[axis] = static_cast<int64_t>(shapes[shape_offset[i] + axis]);
            strides[axis] = stride;
            stride *= shape[axis] > 1 ? shape[axis] : 1;
        }
        ManagedTensor& managed = group->tensors[i];
        managed.tensor = {reinterpret_cast<void*>(address + offset[i]),
                          device_type,
                          device_id,
                          ndim[i],
                          {static_cast<uint8_t>(type), static_cast<uint8_t>(type >> 8), static_cast<uint16_t>(type >> 16)},
                          shape,
                          strides,
                          0};
        managed.context = group;
        managed.deleter = delete_tensor;
        void* capsule = python->capsule_new(&managed, kName, destroy_capsule);
        if (!capsule) {
            failed = true;
            break;
        }
        group->left.fetch_add(1, std::memory_order_relaxed);
        failed = python->list_set_item(list, static_cast<intptr_t>(i), capsule) != 0;
    }
    if (failed) {
        python->decref(list);
        list = nullptr;
    }
    drop(group);
    return list;
}
