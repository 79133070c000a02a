// The rest of the runtime's C interface: errors, the device, memory; streams and events, which have
// nothing to do.
#include <cstdlib>
#include <cstring>

#include "api.h"
#include "memory.h"

using cudasim::DeviceMemory;
using cudasim::Runtime;
using namespace cudasim::api;

namespace {

// An A100, as far as cudaDeviceGetAttribute goes.
int device_attribute(int attribute) {
  switch (attribute) {
    case 1:
      return 1024;  // threads per block
    case 2:
    case 3:
      return 1024;  // block x, y
    case 4:
      return 64;
    case 5:
      return 0x7FFFFFFF;  // grid x
    case 6:
    case 7:
      return 65535;
    case 8:
      return 48 * 1024;  // shared memory per block
    case 9:
      return 64 * 1024;  // constant memory
    case 10:
      return 32;  // warp size
    case 12:
      return 65536;  // registers per block
    case 13:
      return 1410000;  // kHz
    case 16:
      return 108;  // multiprocessors
    case 37:
      return 5120;  // memory bus width, bits
    case 38:
      return 40 * 1024 * 1024;  // L2
    case 39:
      return kMaxThreadsPerSm;
    case 75:
      return 8;  // compute capability
    case 76:
      return 0;
    case 81:
      return static_cast<int>(kSharedPerSm);
    case 82:
      return 65536;  // registers per multiprocessor
    case 95:
      return 1;  // cooperative launch
    case 97:
      return 163 * 1024;  // shared memory per block, opted in
    case 106:
      return kMaxBlocksPerSm;
    case 111:
      return static_cast<int>(kReservedSharedPerBlock);
    default:
      return 0;
  }
}

}  // namespace

extern "C" {

int cudaGetLastError() {
  return Runtime::instance().last_error(true);
}
int cudaPeekAtLastError() {
  return Runtime::instance().last_error(false);
}
const char* cudaGetErrorName(int error) {
  return error == 0     ? "cudaSuccess"
         : error == 1   ? "cudaErrorInvalidValue"
         : error == 2   ? "cudaErrorMemoryAllocation"
         : error == 9   ? "cudaErrorInvalidConfiguration"
         : error == 98  ? "cudaErrorInvalidDeviceFunction"
         : error == 719 ? "cudaErrorLaunchFailure"
         : error == 801 ? "cudaErrorNotSupported"
                        : "cudaErrorUnknown";
}
const char* cudaGetErrorString(int error) {
  return error == 0     ? "no error"
         : error == 1   ? "invalid argument"
         : error == 2   ? "out of memory"
         : error == 9   ? "invalid configuration argument"
         : error == 98  ? "invalid device function"
         : error == 719 ? "unspecified launch failure (see the simulator's findings)"
         : error == 801 ? "operation not supported"
                        : "unknown error";
}

int cudaGetDevice(int* device) {
  return *device = 0, kSuccess;
}
int cudaSetDevice(int device) {
  return device == 0 ? kSuccess : fail(101);
}
int cudaGetDeviceCount(int* count) {
  return *count = 1, kSuccess;
}
int cudaDeviceGetAttribute(int* value, int attribute, int) {
  return *value = device_attribute(attribute), kSuccess;
}
int cudaDeviceSynchronize() {
  return kSuccess;
}
int cudaDeviceReset() {
  return kSuccess;
}
int cudaDriverGetVersion(int* version) {
  return *version = 13000, kSuccess;
}
int cudaRuntimeGetVersion(int* version) {
  return *version = 13000, kSuccess;
}

int cudaMalloc(void** p, size_t bytes) {
  return (*p = DeviceMemory::instance().allocate(bytes)) ? kSuccess : fail(kMemoryAllocation);
}
int cudaMallocAsync(void** p, size_t bytes, void*) {
  return cudaMalloc(p, bytes);
}
int cudaFree(void* p) {
  return !p || DeviceMemory::instance().release(p) ? kSuccess : fail(kInvalidValue);
}
int cudaFreeAsync(void* p, void*) {
  return cudaFree(p);
}
int cudaMallocHost(void** p, size_t bytes) {
  return (*p = std::malloc(bytes)) ? kSuccess : fail(kMemoryAllocation);
}
int cudaFreeHost(void* p) {
  return std::free(p), kSuccess;
}
int cudaMemcpy(void* to, const void* from, size_t bytes, int) {
  return std::memmove(to, from, bytes), kSuccess;
}
int cudaMemcpyAsync(void* to, const void* from, size_t bytes, int, void*) {
  return std::memmove(to, from, bytes), kSuccess;
}
int cudaMemset(void* p, int value, size_t bytes) {
  return std::memset(p, value, bytes), kSuccess;
}
int cudaMemsetAsync(void* p, int value, size_t bytes, void*) {
  return std::memset(p, value, bytes), kSuccess;
}
int cudaGetSymbolAddress(void** p, const void* symbol) {
  return (*p = Runtime::instance().symbol_address(symbol)) ? kSuccess : fail(13);
}
int cudaMemcpyToSymbol(const void* symbol, const void* from, size_t bytes, size_t offset, int) {
  void* p = Runtime::instance().symbol_address(symbol);
  return p ? (std::memcpy(static_cast<char*>(p) + offset, from, bytes), kSuccess) : fail(13);
}
int cudaMemcpyFromSymbol(void* to, const void* symbol, size_t bytes, size_t offset, int) {
  void* p = Runtime::instance().symbol_address(symbol);
  return p ? (std::memcpy(to, static_cast<char*>(p) + offset, bytes), kSuccess) : fail(13);
}

int cudaStreamCreate(void** s) {
  return *s = nullptr, kSuccess;
}
int cudaStreamCreateWithFlags(void** s, unsigned) {
  return *s = nullptr, kSuccess;
}
int cudaStreamDestroy(void*) {
  return kSuccess;
}
int cudaStreamSynchronize(void*) {
  return kSuccess;
}
int cudaStreamWaitEvent(void*, void*, unsigned) {
  return kSuccess;
}
int cudaStreamIsCapturing(void*, int* status) {
  return *status = 0, kSuccess;
}
int cudaEventCreate(void** e) {
  return *e = nullptr, kSuccess;
}
int cudaEventCreateWithFlags(void** e, unsigned) {
  return *e = nullptr, kSuccess;
}
int cudaEventDestroy(void*) {
  return kSuccess;
}
int cudaEventRecord(void*, void*) {
  return kSuccess;
}
int cudaEventSynchronize(void*) {
  return kSuccess;
}
int cudaEventElapsedTime(float* ms, void*, void*) {
  return *ms = 0, kSuccess;
}

// For the binding layer: which host memory the kernels may touch.
void cudasim_register_buffer(const void* p, size_t bytes, int writable, const char* name) {
  DeviceMemory::instance().add(p, bytes, writable != 0, name ? name : "");
}
void cudasim_unregister_buffer(const void* p) {
  DeviceMemory::instance().remove(p);
}

}  // extern "C"
