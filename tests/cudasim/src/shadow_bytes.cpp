// Granules that single bytes of were accessed: each byte has tags of its own until the whole
// granule is written again.
#include "cta.h"
#include "shadow.h"
#include "warp.h"

namespace cudasim {

std::vector<SharedShadow::Piece>* SharedShadow::pieces(int64_t granule) {
  if (written_[granule] != kSplit) return nullptr;
  auto it = split_.find(granule);
  return it == split_.end() ? nullptr : &it->second;
}

std::vector<SharedShadow::Piece>& SharedShadow::split(int64_t granule) {
  if (auto* existing = pieces(granule)) return *existing;
  Piece whole{written_[granule], writer_pc_[granule], {}};
  for (int v = 0; v < warps_; ++v) whole.read.push_back(read_[v * plane_ + granule]);
  written_[granule] = kSplit;
  return split_[granule] = std::vector<Piece>(size_t(1) << shift_, whole);
}

SharedShadow::Cell SharedShadow::cell(std::vector<Piece>& pieces, int64_t granule, int byte) {
  Piece& p = pieces[byte];
  return {&p.written, &p.writer_pc, p.read.data(), 1, (granule << shift_) + byte, 1};
}

void SharedShadow::mark_read(uint32_t& mark, uint32_t lane) const {
  const uint32_t now = time_ << kWarpShift, mine = now | lane;
  mark = mark >> kWarpShift == time_ && mark != mine ? now | kManyLanes : mine;
}

// A read of a whole granule that the quick test did not pass.
bool SharedShadow::read_pieces(Warp& w, int pc, int lane, int64_t granule, bool collective) {
  auto* parts = pieces(granule);
  if (!parts) return check_read(w, pc, lane, cell(granule), collective);
  bool ok = true;
  for (size_t b = 0; b < parts->size(); ++b) {
    ok = ok && check_read(w, pc, lane, cell(*parts, granule, int(b)), collective);
    mark_read((*parts)[b].read[w.id], collective ? kManyLanes : uint32_t(lane));
  }
  return ok;
}

// A write of a whole granule: its caller sets the new tag, which ends the split.
bool SharedShadow::check_granule_write(Warp& w, int pc, int lane, int64_t granule, bool atomic,
                                       const uint8_t* data) {
  auto* parts = pieces(granule);
  if (!parts) return check_write(w, pc, lane, cell(granule), atomic, data);
  bool ok = true;
  for (size_t b = 0; b < parts->size(); ++b)
    ok = ok &&
         check_write(w, pc, lane, cell(*parts, granule, int(b)), atomic, data ? data + b : nullptr);
  split_.erase(granule);
  written_[granule] = 0;
  for (int v = 0; v < warps_; ++v)
    read_[v * plane_ + granule] = 0;  // the write is later than every read
  return ok;
}

uint32_t SharedShadow::access_bytes(Warp& w, int pc, uint32_t mask, const uint32_t* offset,
                                    int bytes, uint32_t flags, const uint8_t* const* data,
                                    bool write) {
  uint32_t found = 0;
  const bool atomic = (flags & kLaneMask) == kAtomicLane;
  for (uint32_t m = mask; m; m &= m - 1) {
    const int lane = __builtin_ctz(m);
    const int64_t granule = offset[lane] >> shift_;
    const int first = static_cast<int>(offset[lane] - (granule << shift_));
    auto& parts = split(granule);
    for (int b = 0; b < bytes; ++b) {
      Cell c = cell(parts, granule, first + b);
      if (!write) {
        if (!check_read(w, pc, lane, c, false)) found |= 1u << lane;
        mark_read(c.read[w.id], uint32_t(lane));
        continue;
      }
      if (!check_write(w, pc, lane, c, atomic, data ? data[lane] + b : nullptr))
        found |= 1u << lane;
      *c.written = tag(w.id, atomic ? kAtomicLane : uint32_t(lane));
      *c.writer_pc = pc;
    }
  }
  return found;
}

}  // namespace cudasim
