#include "shadow.h"

#include <algorithm>
#include <cstdio>
#include <cstring>

#include "cta.h"
#include "warp.h"

namespace cudasim {

void SharedShadow::begin_cta(Cta& cta, int warps, int64_t bytes, int granule_shift) {
  cta_ = &cta;
  enabled_ = cta.launch->options.race_check;
  int64_t granules = (bytes + (1 << granule_shift) - 1) >> granule_shift;
  bool new_shape = warps != warps_ || granule_shift != shift_ || granules > granules_;
  if (new_shape || time_ > kMaxTime / 2) {
    warps_ = warps;
    shift_ = granule_shift;
    granules_ = granules;
    plane_ = granules + 16;  // a vector that starts at the last granule stays inside
    written_.assign(plane_, 0);
    writer_pc_.assign(plane_, -1);
    read_.assign(plane_ * warps, 0);
    time_ = 1;
  }
  for (const auto& [granule, pieces] : split_)
    if (granule < plane_) written_[granule] = 0;
  split_.clear();
  start_ = ++time_;
  known_.assign(size_t(warps) * warps, start_ - 1);
  horizon_.assign(warps, start_ - 1);
  has_lane_known_.assign(warps, false);
}

void SharedShadow::tick() {
  if (++time_ >= kMaxTime)
    enabled_ = false;  // a million synchronisation events in one CTA: the clock is used up
}

void SharedShadow::update_horizon(int w) {
  horizon_[w] = *std::min_element(known_.begin() + w * warps_, known_.begin() + (w + 1) * warps_);
}

bool SharedShadow::ordered(const Warp& w, int lane, uint32_t time, int u, uint32_t u_lane) const {
  if (known(w.id, u) >= time) return true;
  if (u != w.id) return false;
  if (u_lane == uint32_t(lane)) return true;
  return u_lane < kWarpSize && lane < kWarpSize && has_lane_known_[u] &&
         lane_known_[(size_t(u) * kWarpSize + lane) * kWarpSize + u_lane] >= time;
}

void SharedShadow::warp_sync(Warp& w, uint32_t mask, uint32_t live) {
  if (!enabled_) return;
  if ((mask & live) == live) {
    known_[w.id * warps_ + w.id] = time_;
    update_horizon(w.id);
  } else {
    if (lane_known_.size() < size_t(warps_) * kWarpSize * kWarpSize)
      lane_known_.resize(size_t(warps_) * kWarpSize * kWarpSize);
    uint32_t* table = &lane_known_[size_t(w.id) * kWarpSize * kWarpSize];
    if (!has_lane_known_[w.id]) std::fill(table, table + kWarpSize * kWarpSize, start_ - 1);
    has_lane_known_[w.id] = true;
    uint32_t joined[kWarpSize];
    for (int u = 0; u < kWarpSize; ++u) {
      joined[u] = start_ - 1;
      for (int l = 0; l < kWarpSize; ++l)
        if (mask >> l & 1)
          joined[u] = std::max(joined[u], u == l ? time_ : table[l * kWarpSize + u]);
    }
    for (int l = 0; l < kWarpSize; ++l)
      if (mask >> l & 1) std::copy(joined, joined + kWarpSize, table + l * kWarpSize);
  }
  tick();
}

void SharedShadow::barrier(const std::vector<int>& arrived, const std::vector<int>& released) {
  if (!enabled_) return;
  std::vector<uint32_t> joined(warps_, start_ - 1);
  for (int a : arrived) {
    for (int u = 0; u < warps_; ++u) joined[u] = std::max(joined[u], known(a, u));
    joined[a] = time_;
  }
  for (int r : released) {
    for (int u = 0; u < warps_; ++u) known_[r * warps_ + u] = std::max(known(r, u), joined[u]);
    update_horizon(r);
  }
  tick();
}

std::string SharedShadow::thread_name(int warp, uint32_t lane) const {
  if (lane < kWarpSize) return "thread " + std::to_string(warp * kWarpSize + lane);
  return "warp " + std::to_string(warp);
}

void SharedShadow::report(Warp& w, int pc, int lane, const char* kind, const std::string& what,
                          int64_t offset, int other_pc) {
  char where[64];
  std::snprintf(where, sizeof where, " at shared offset 0x%llx",
                static_cast<unsigned long long>(offset));
  std::string message = what + where;
  if (other_pc >= 0) {
    Finding other;
    describe_location(*cta_->program, other_pc, other);
    message +=
        " (written by PTX line " + std::to_string(other.ptx_line) + ", " + other.source + ")";
  }
  cta_->report(kind, pc, &w, lane, message);
}

SharedShadow::Cell SharedShadow::cell(int64_t g) {
  return {&written_[g], &writer_pc_[g], &read_[g], plane_, g << shift_, 1 << shift_};
}

bool SharedShadow::check_read(Warp& w, int pc, int lane, const Cell& c, bool collective) {
  uint32_t t = *c.written;
  uint32_t time = (t & ~kInFlight) >> kTimeShift, u_lane = t & kLaneMask;
  int u = t >> kWarpShift & 31;
  if (time < start_) {
    report(w, pc, lane, "shared_uninitialized_read",
           "a read of memory that no thread of the block has written", c.offset, -1);
    return false;
  }
  if (t & kInFlight) {
    report(w, pc, lane, "cp_async_in_flight",
           "a read of data that a cp.async of " + thread_name(u, u_lane) +
               " is still copying; its thread has not waited for it",
           c.offset, *c.writer_pc);
    return false;
  }
  if (ordered(w, collective ? kWarpSize : lane, time, u, u_lane)) return true;
  report(w, pc, lane, "shared_race",
         u == w.id ? "a read of what another lane of the same warp (" + thread_name(u, u_lane) +
                         ") wrote, with no __syncwarp between"
                   : "a read of what " + thread_name(u, u_lane) + " wrote, with no barrier between",
         c.offset, *c.writer_pc);
  return false;
}

bool SharedShadow::check_write(Warp& w, int pc, int lane, const Cell& c, bool atomic,
                               const uint8_t* data) {
  uint32_t t = *c.written;
  uint32_t time = (t & ~kInFlight) >> kTimeShift, u_lane = t & kLaneMask;
  int u = t >> kWarpShift & 31;
  if (time >= start_) {
    if (t & kInFlight) {
      report(w, pc, lane, "cp_async_in_flight",
             "a write over a cp.async of " + thread_name(u, u_lane) + " in flight", c.offset,
             *c.writer_pc);
      return false;
    }
    bool both_atomic = atomic && u_lane == kAtomicLane;
    if (!both_atomic && !ordered(w, lane, time, u, u_lane)) {
      bool same_value = data && std::memcmp(data, cta_->shared + c.offset, c.bytes) == 0;
      if (!same_value) {
        report(w, pc, lane, "shared_race",
               "a write over what " + thread_name(u, u_lane) + " wrote, with no " +
                   (u == w.id ? "__syncwarp" : "barrier") + " between",
               c.offset, *c.writer_pc);
        return false;
      }
    }
  }
  for (int v = 0; v < warps_; ++v) {
    uint32_t r = c.read[v * c.stride];
    uint32_t r_time = r >> kWarpShift, r_lane = r & kLaneMask;
    if (r_time < start_ || ordered(w, lane, r_time, v, r_lane)) continue;
    report(w, pc, lane, "shared_race",
           "a write over what " + thread_name(v, r_lane) + " read, with no " +
               (v == w.id ? "__syncwarp" : "barrier") + " between",
           c.offset, -1);
    return false;
  }
  return true;
}

template <int N>
uint32_t SharedShadow::read_n(Warp& w, int pc, uint32_t mask, const uint32_t* offset,
                              bool collective) {
  const uint32_t low = start_ << kTimeShift,
                 high = horizon_[w.id] << kTimeShift | ((1u << kTimeShift) - 1);
  const uint32_t now = time_ << kWarpShift;
  uint32_t* plane = &read_[w.id * plane_];
  uint32_t suspicious = 0;
  for (uint32_t m = mask; m; m &= m - 1) {
    int lane = __builtin_ctz(m);
    int64_t g = offset[lane] >> shift_;
    const uint32_t mine = now | (collective ? kManyLanes : uint32_t(lane));
    uint32_t bad = 0;
    for (int i = 0; i < N; ++i) {
      uint32_t t = written_[g + i];
      bad |= uint32_t(t < low) | uint32_t(t > high);
      uint32_t old = plane[g + i];
      plane[g + i] = (old >> kWarpShift) == time_ && old != mine ? now | kManyLanes : mine;
    }
    if (bad) suspicious |= 1u << lane;
  }
  uint32_t found = 0;
  for (uint32_t m = suspicious; m; m &= m - 1) {
    int lane = __builtin_ctz(m);
    for (int i = 0; i < N; ++i)
      if (!read_pieces(w, pc, lane, (offset[lane] >> shift_) + i, collective)) {
        found |= 1u << lane;
        break;
      }
  }
  return found;
}

uint32_t SharedShadow::read(Warp& w, int pc, uint32_t mask, const uint32_t* offset, int bytes,
                            bool collective) {
  if (!enabled_) return 0;
  if (bytes < 1 << shift_) return access_bytes(w, pc, mask, offset, bytes, 0, nullptr, false);
  switch (bytes >> shift_) {
    case 1:
      return read_n<1>(w, pc, mask, offset, collective);
    case 2:
      return read_n<2>(w, pc, mask, offset, collective);
    case 4:
      return read_n<4>(w, pc, mask, offset, collective);
    case 8:
      return read_n<8>(w, pc, mask, offset, collective);
    default:
      return read_n<16>(w, pc, mask, offset, collective);
  }
}

template <int N>
uint32_t SharedShadow::write_n(Warp& w, int pc, uint32_t mask, const uint32_t* offset,
                               uint32_t flags, const uint8_t* const* data) {
  const uint32_t high = horizon_[w.id] << kTimeShift | ((1u << kTimeShift) - 1);
  const uint32_t read_high = horizon_[w.id] << kWarpShift | ((1u << kWarpShift) - 1);
  uint32_t suspicious = 0;
  for (uint32_t m = mask; m; m &= m - 1) {
    int lane = __builtin_ctz(m);
    int64_t g = offset[lane] >> shift_;
    uint32_t bad = 0;
    for (int i = 0; i < N; ++i) bad |= uint32_t(written_[g + i] > high);
    for (int v = 0; v < warps_; ++v) {
      const uint32_t* plane = &read_[v * plane_ + g];
      for (int i = 0; i < N; ++i) bad |= uint32_t(plane[i] > read_high);
    }
    if (bad) suspicious |= 1u << lane;
  }
  const bool atomic = (flags & kLaneMask) == kAtomicLane;
  uint32_t found = 0;
  for (uint32_t m = suspicious; m; m &= m - 1) {
    int lane = __builtin_ctz(m);
    for (int i = 0; i < N; ++i)
      if (!check_granule_write(w, pc, lane, (offset[lane] >> shift_) + i, atomic,
                               data ? data[lane] + (i << shift_) : nullptr)) {
        found |= 1u << lane;
        break;
      }
  }
  // mark, and see whether two lanes of this instruction wrote the same granule
  const uint32_t base = tag(w.id, 0) | (flags & kInFlight);
  for (uint32_t m = mask; m; m &= m - 1) {
    int lane = __builtin_ctz(m);
    int64_t g = offset[lane] >> shift_;
    for (int i = 0; i < N; ++i) {
      written_[g + i] = base | (atomic ? kAtomicLane : uint32_t(lane));
      writer_pc_[g + i] = pc;
    }
  }
  if (atomic) return found;
  for (uint32_t m = mask & ~found; m; m &= m - 1) {
    int lane = __builtin_ctz(m);
    int64_t g = offset[lane] >> shift_;
    uint32_t differ = 0;
    for (int i = 0; i < N; ++i) differ |= written_[g + i] ^ (base | uint32_t(lane));
    if (!differ) continue;
    for (int i = 0; i < N; ++i) {
      uint32_t other = written_[g + i] & kLaneMask;
      if (other == uint32_t(lane)) continue;
      int64_t skip = ((g + i) << shift_) - offset[other];
      if (data && skip >= 0 &&
          std::memcmp(data[lane] + (i << shift_), data[other] + skip, size_t(1) << shift_) == 0)
        continue;
      report(w, pc, lane, "shared_race",
             "two lanes (" + thread_name(w.id, other) + " too) of one instruction write",
             (g + i) << shift_, -1);
      found |= 1u << lane;
      break;
    }
  }
  return found;
}

uint32_t SharedShadow::dispatch_write(Warp& w, int pc, uint32_t mask, const uint32_t* offset,
                                      int bytes, uint32_t flags, const uint8_t* const* data) {
  if (!enabled_) return 0;
  if (bytes < 1 << shift_) return access_bytes(w, pc, mask, offset, bytes, flags, data, true);
  switch (bytes >> shift_) {
    case 1:
      return write_n<1>(w, pc, mask, offset, flags, data);
    case 2:
      return write_n<2>(w, pc, mask, offset, flags, data);
    case 4:
      return write_n<4>(w, pc, mask, offset, flags, data);
    case 8:
      return write_n<8>(w, pc, mask, offset, flags, data);
    default:
      return write_n<16>(w, pc, mask, offset, flags, data);
  }
}

uint32_t SharedShadow::write(Warp& w, int pc, uint32_t mask, const uint32_t* offset, int bytes,
                             const uint8_t* const* data) {
  return dispatch_write(w, pc, mask, offset, bytes, 0, data);
}

uint32_t SharedShadow::atomic(Warp& w, int pc, uint32_t mask, const uint32_t* offset, int bytes) {
  return dispatch_write(w, pc, mask, offset, bytes, kAtomicLane, nullptr);
}

uint32_t SharedShadow::issue(Warp& w, int pc, uint32_t mask, const uint32_t* offset, int bytes) {
  return dispatch_write(w, pc, mask, offset, bytes, kInFlight, nullptr);
}

void SharedShadow::complete(Warp& w, int lane, uint32_t offset, int bytes) {
  if (!enabled_) return;
  int n = std::max(1, bytes >> shift_);
  std::fill_n(written_.begin() + (offset >> shift_), n, tag(w.id, lane));
}

void SharedShadow::forget(uint32_t offset, int bytes) {
  if (!enabled_) return;
  std::fill_n(written_.begin() + (offset >> shift_), std::max(1, bytes >> shift_), 0u);
}

}  // namespace cudasim
