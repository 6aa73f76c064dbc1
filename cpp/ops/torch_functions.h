// Functions and types of torch's stable C interface that the operations use, declared here: no file
// of torch is needed to compile. All are exported by libtorch_cpu.so from torch 2.11 on
// (tests/golden/torch_2_11_functions.txt); torch promises not to change them.

#pragma once

#include <cstdint>

extern "C" {

struct AtenTensorOpaque;
using AtenTensorHandle = AtenTensorOpaque*;
struct TorchLibraryOpaque;
using TorchLibraryHandle = TorchLibraryOpaque*;
struct DeviceGuardOpaque;
using DeviceGuardHandle = DeviceGuardOpaque*;

// An argument or a result of an operation: a number, a handle, or for an optional argument null or
// the address of one on the heap.
using StableIValue = uint64_t;
// Takes ownership of num_inputs arguments on the stack and leaves num_outputs results there.
using StableKernel = void (*)(StableIValue* stack, uint64_t num_inputs, uint64_t num_outputs);

// Functions that return an error code return 0 for success.
int32_t aoti_torch_library_init_impl(const char* name_space,
                                     const char* dispatch_key,
                                     const char* file,
                                     uint32_t line,
                                     TorchLibraryHandle* library);
int32_t torch_library_impl(TorchLibraryHandle library,
                           const char* name,
                           StableKernel kernel,
                           uint64_t build_version);

int32_t aoti_torch_delete_tensor_object(AtenTensorHandle tensor);
int32_t aoti_torch_new_tensor_handle(AtenTensorHandle tensor, AtenTensorHandle* other);
int32_t aoti_torch_empty_strided(int64_t dim,
                                 const int64_t* sizes,
                                 const int64_t* strides,
                                 int32_t dtype,
                                 int32_t device_type,
                                 int32_t device_index,
                                 AtenTensorHandle* result);
// Does not own the memory.
int32_t aoti_torch_create_tensor_from_blob(void* data,
                                           int64_t dim,
                                           const int64_t* sizes,
                                           const int64_t* strides,
                                           int64_t storage_offset,
                                           int32_t dtype,
                                           int32_t device_type,
                                           int32_t device_index,
                                           AtenTensorHandle* result);
// The options may be null: those of `tensor`.
int32_t aoti_torch_aten_new_empty(AtenTensorHandle tensor,
                                  const int64_t* sizes,
                                  int64_t dim,
                                  int32_t* dtype,
                                  int32_t* layout,
                                  int32_t* device_type,
                                  int32_t device_index,
                                  int32_t* is_pinned,
                                  AtenTensorHandle* result);
int32_t aoti_torch_copy_(AtenTensorHandle to, AtenTensorHandle from, int32_t non_blocking);

int32_t aoti_torch_get_dim(AtenTensorHandle tensor, int64_t* dim);
int32_t aoti_torch_get_sizes(AtenTensorHandle tensor, int64_t** sizes);      // borrowed
int32_t aoti_torch_get_strides(AtenTensorHandle tensor, int64_t** strides);  // borrowed
int32_t aoti_torch_get_numel(AtenTensorHandle tensor, int64_t* numel);
int32_t aoti_torch_get_dtype(AtenTensorHandle tensor, int32_t* dtype);
int32_t aoti_torch_is_contiguous(AtenTensorHandle tensor, bool* is_contiguous);
int32_t torch_get_const_data_ptr(AtenTensorHandle tensor, const void** data);
int32_t torch_get_mutable_data_ptr(AtenTensorHandle tensor, void** data);

int32_t aoti_torch_get_device_type(AtenTensorHandle tensor, int32_t* type);
int32_t aoti_torch_get_device_index(AtenTensorHandle tensor, int32_t* index);  // -1 for the CPU

int32_t aoti_torch_device_type_cpu();
int32_t aoti_torch_dtype_float32();
int32_t aoti_torch_dtype_float64();
int32_t aoti_torch_dtype_bfloat16();
int32_t aoti_torch_dtype_float16();
int32_t aoti_torch_dtype_float8_e4m3fn();
int32_t aoti_torch_dtype_uint8();
int32_t aoti_torch_dtype_int32();
int32_t aoti_torch_dtype_int64();
int32_t aoti_torch_dtype_bool();
// Makes a device the current one until the guard is deleted.
int32_t aoti_torch_create_device_guard(int32_t device_index, DeviceGuardHandle* guard);
int32_t aoti_torch_delete_device_guard(DeviceGuardHandle guard);
int32_t torch_get_num_threads(uint32_t* num_threads);

}  // extern "C"
