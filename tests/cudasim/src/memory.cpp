#include "memory.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace cudasim {

BufferTable::BufferTable(std::vector<Buffer> buffers) : buffers_(std::move(buffers)) {
  std::sort(buffers_.begin(), buffers_.end(),
            [](const Buffer& a, const Buffer& b) { return a.begin < b.begin; });
  uint64_t end = 0;
  for (const auto& b : buffers_) max_end_.push_back(end = std::max(end, b.end));
}

const Buffer* BufferTable::find(uint64_t begin, uint64_t size) const {
  auto it = std::upper_bound(buffers_.begin(), buffers_.end(), begin,
                             [](uint64_t a, const Buffer& b) { return a < b.begin; });
  const Buffer* found = nullptr;
  for (size_t i = it - buffers_.begin(); i-- > 0 && max_end_[i] >= begin + size;) {
    if (buffers_[i].end < begin + size) continue;
    if (!found || buffers_[i].writable) found = &buffers_[i];
    if (found->writable) break;
  }
  return found;
}

std::string BufferTable::describe(uint64_t address) const {
  char text[200];
  const Buffer* nearest = nullptr;
  uint64_t distance = UINT64_MAX;
  bool behind = false;
  for (const auto& b : buffers_) {
    uint64_t d = address >= b.end ? address - b.end : address < b.begin ? b.begin - address : 0;
    if (d < distance) {
      distance = d;
      nearest = &b;
      behind = address >= b.end;
    }
  }
  if (!nearest) return "no buffer is registered";
  std::snprintf(text, sizeof text, "%llu bytes %s the %llu-byte buffer %s",
                static_cast<unsigned long long>(distance),
                distance == 0 ? "into"
                : behind      ? "past the end of"
                              : "before the start of",
                static_cast<unsigned long long>(nearest->end - nearest->begin),
                nearest->name.empty() ? "(unnamed)" : nearest->name.c_str());
  return text;
}

DeviceMemory& DeviceMemory::instance() {
  static DeviceMemory* memory =
      new DeviceMemory;  // outlives the static destructors that release through it
  return *memory;
}

void DeviceMemory::add(const void* address, size_t bytes, bool writable, const std::string& name) {
  if (bytes == 0) return;
  std::lock_guard<std::mutex> lock(mutex_);
  uint64_t begin = reinterpret_cast<uint64_t>(address);
  Entry& e = entries_[{begin, begin + bytes}];
  e.buffer = {begin, begin + bytes, (e.uses > 0 && e.buffer.writable) || writable, name};
  ++e.uses;
  snapshot_.reset();
}

bool DeviceMemory::remove(const void* address) {
  std::lock_guard<std::mutex> lock(mutex_);
  auto it = entries_.lower_bound({reinterpret_cast<uint64_t>(address), 0});
  if (it == entries_.end() || it->first.first != reinterpret_cast<uint64_t>(address)) return false;
  if (--it->second.uses == 0) entries_.erase(it);
  snapshot_.reset();
  return true;
}

void* DeviceMemory::allocate(size_t bytes) {
  size_t rounded = (std::max<size_t>(bytes, 1) + 255) / 256 * 256;
  void* p = std::aligned_alloc(256, rounded);
  if (!p) return nullptr;
  std::memset(p, 0xFF, rounded);
  add(p, bytes, true, "cudaMalloc");
  std::lock_guard<std::mutex> lock(mutex_);
  allocations_[reinterpret_cast<uint64_t>(p)] = p;
  return p;
}

bool DeviceMemory::release(void* address) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (allocations_.erase(reinterpret_cast<uint64_t>(address)) == 0) return false;
  }
  remove(address);
  std::free(address);
  return true;
}

std::shared_ptr<const BufferTable> DeviceMemory::snapshot() {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!snapshot_) {
    std::vector<Buffer> buffers;
    for (const auto& [key, e] : entries_) buffers.push_back(e.buffer);
    snapshot_ = std::make_shared<BufferTable>(std::move(buffers));
  }
  return snapshot_;
}

size_t DeviceMemory::count() {
  std::lock_guard<std::mutex> lock(mutex_);
  return entries_.size();
}

}  // namespace cudasim
