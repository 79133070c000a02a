// The address spaces. Device memory is host memory; kernels may touch only what has been
// registered.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace cudasim {

// Generic addresses of the other spaces are not canonical on x86-64, so that a confusion of spaces
// always faults.
constexpr uint64_t kSharedWindow = 0x0100000000000000ull;
constexpr uint64_t kLocalWindow = 0x0200000000000000ull;
constexpr uint64_t kParamWindow = 0x0300000000000000ull;
constexpr uint64_t kWindowMask = 0xFF00000000000000ull;
// Addresses inside a space do not start at 0 either: a null pointer is no valid shared address.
constexpr uint32_t kSharedBase = 0x01000000u;
constexpr uint32_t kLocalBase = 0x02000000u;
constexpr uint32_t kParamBase = 0x03000000u;

struct Buffer {
  uint64_t begin = 0, end = 0;
  bool writable = true;
  std::string name;
};

// The registered buffers as one launch sees them: immutable, sorted by address.
class BufferTable {
 public:
  explicit BufferTable(std::vector<Buffer> buffers);
  // The buffer that holds [begin, begin + size), or null.
  const Buffer* find(uint64_t begin, uint64_t size) const;
  // A sentence about the surroundings of an address that lies in no buffer.
  std::string describe(uint64_t address) const;

 private:
  std::vector<Buffer> buffers_;
  std::vector<uint64_t>
      max_end_;  // the largest end of buffers 0..i: views of one storage may overlap
};

class DeviceMemory {
 public:
  static DeviceMemory& instance();
  // The same range may be registered more than once; it stays until as many unregister calls have
  // come.
  void add(const void* address, size_t bytes, bool writable, const std::string& name);
  bool remove(const void* address);
  void* allocate(size_t bytes);  // filled with 0xFF
  bool release(void* address);
  std::shared_ptr<const BufferTable> snapshot();
  size_t count();

 private:
  struct Entry {
    Buffer buffer;
    int uses = 0;
  };
  std::mutex mutex_;
  std::map<std::pair<uint64_t, uint64_t>, Entry> entries_;
  std::map<uint64_t, void*> allocations_;
  std::shared_ptr<const BufferTable> snapshot_;
};

}  // namespace cudasim
