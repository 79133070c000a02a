#include "access.h"

#include <algorithm>
#include <cstdio>

#include "cta.h"

namespace cudasim {

Space parse_space(const PtxInst& p) {
  for (const auto& m : p.mods) {
    if (m == "global") return Space::kGlobal;
    if (m == "shared" || m == "shared::cta") return Space::kShared;
    if (m == "local") return Space::kLocal;
    if (m == "param" || m == "param::entry" || m == "param::func") return Space::kParam;
    if (m == "const") return Space::kConst;
  }
  return Space::kGeneric;
}

namespace {

std::string hex(uint64_t x) {
  char text[32];
  std::snprintf(text, sizeof text, "0x%llx", static_cast<unsigned long long>(x));
  return text;
}

bool misaligned(Warp& w, int lane, uint64_t address, int bytes) {
  if (address % bytes == 0) return false;
  w.cta->report("misaligned_address", w.pc, &w, lane,
                "an access of " + std::to_string(bytes) + " bytes at address " + hex(address) +
                    ", which is no multiple of its size");
  return true;
}

bool allowed_global(Warp& w, int lane, uint64_t address, int bytes, bool write) {
  if (misaligned(w, lane, address, bytes)) return false;
  if (address & kWindowMask || (address < 0x10000000u && address >= kSharedBase)) {
    w.cta->report(
        "wrong_address_space", w.pc, &w, lane,
        "a global access with address " + hex(address) + ", which belongs to another space");
    return false;
  }
  const Buffer* b = w.cta->launch->buffers->find(address, bytes);
  if (!b) {
    if (!w.cta->launch->options.strict_memory) return true;
    w.cta->report("global_out_of_bounds", w.pc, &w, lane,
                  std::string(write ? "a write" : "a read") + " of " + std::to_string(bytes) +
                      " bytes at " + hex(address) + ", " +
                      w.cta->launch->buffers->describe(address));
    return false;
  }
  if (write && !b->writable) {
    w.cta->report("global_read_only", w.pc, &w, lane,
                  "a write to the read-only buffer " + (b->name.empty() ? "(unnamed)" : b->name) +
                      ", " + w.cta->launch->buffers->describe(address));
    return false;
  }
  w.last_buffer = b;
  return true;
}

}  // namespace

uint32_t check_global(Warp& w, uint32_t mask, const uint64_t* address, int bytes, bool write) {
  uint64_t low = UINT64_MAX, high = 0, bits = 0;
  for (int l = 0; l < kWarpSize; ++l) {
    bool on = mask >> l & 1;
    low = std::min(low, on ? address[l] : UINT64_MAX);
    high = std::max(high, on ? address[l] : 0);
    bits |= on ? address[l] : 0;
  }
  if ((bits & uint64_t(bytes - 1)) == 0 && !(high & kWindowMask)) {
    const Buffer* b = w.last_buffer;
    if (b && b->begin <= low && high + bytes <= b->end && (!write || b->writable)) return mask;
    b = w.cta->launch->buffers->find(low, high + bytes - low);
    if (b && (!write || b->writable)) {
      w.last_buffer = b;
      return mask;
    }
  }
  uint32_t ok = 0;
  for (uint32_t m = mask; m; m &= m - 1) {
    int lane = __builtin_ctz(m);
    if (allowed_global(w, lane, address[lane], bytes, write)) ok |= 1u << lane;
  }
  return ok;
}

uint32_t check_shared(Warp& w, uint32_t mask, const uint64_t* address, int bytes,
                      uint32_t* offset) {
  const uint64_t limit = static_cast<uint64_t>(w.cta->shared_size);
  uint64_t worst = 0, bits = 0;
  for (int l = 0; l < kWarpSize; ++l) {
    uint64_t o = mask >> l & 1 ? address[l] - kSharedBase : 0;
    offset[l] = static_cast<uint32_t>(o);
    worst = std::max(worst, o);
    bits |= o;
  }
  if (worst + bytes <= limit && worst <= limit && (bits & uint64_t(bytes - 1)) == 0) return mask;
  uint32_t ok = 0;
  for (uint32_t m = mask; m; m &= m - 1) {
    int lane = __builtin_ctz(m);
    uint64_t o = address[lane] - kSharedBase;
    if (o > limit || o + bytes > limit) {
      w.cta->report("shared_out_of_bounds", w.pc, &w, lane,
                    "an access of " + std::to_string(bytes) + " bytes at shared offset " +
                        std::to_string(static_cast<int64_t>(o)) + "; the block has " +
                        std::to_string(limit) + " bytes");
    } else if (!misaligned(w, lane, o, bytes)) {
      ok |= 1u << lane;
    }
  }
  return ok;
}

uint32_t check_local(Warp& w, uint32_t mask, const uint64_t* address, int bytes, uint32_t* offset) {
  const uint64_t limit = static_cast<uint64_t>(w.cta->program->kernel->local_size);
  uint32_t ok = 0;
  for (uint32_t m = mask; m; m &= m - 1) {
    int lane = __builtin_ctz(m);
    uint64_t o = address[lane] - kLocalBase;
    offset[lane] = static_cast<uint32_t>(o);
    if (o > limit || o + bytes > limit)
      w.cta->report("local_out_of_bounds", w.pc, &w, lane,
                    "an access outside of the thread's stack frame");
    else if (!misaligned(w, lane, o, bytes))
      ok |= 1u << lane;
  }
  return ok;
}

SpaceMasks split_generic(uint32_t mask, uint64_t* address) {
  SpaceMasks s;
  for (uint32_t m = mask; m; m &= m - 1) {
    int lane = __builtin_ctz(m);
    uint64_t window = address[lane] & kWindowMask;
    uint32_t bit = 1u << lane;
    if (window == kSharedWindow)
      s.shared |= bit;
    else if (window == kLocalWindow)
      s.local |= bit;
    else if (window == kParamWindow)
      s.param |= bit;
    else
      s.global |= bit;
    if (!(s.global & bit)) address[lane] -= window;
  }
  return s;
}

// Banks are 4 bytes wide. Accesses of 8 and 16 bytes go in phases of 16 and 8 lanes; a phase takes
// as many wavefronts as the most distinct words that one bank must deliver.
void count_shared(Warp& w, uint32_t mask, const uint32_t* offset, int bytes) {
  const int unit = std::max(bytes, 4), shift = unit == 16 ? 4 : unit == 8 ? 3 : 2;
  const int lanes_a_phase = 128 / unit;
  const uint32_t banks = 128 / unit;
  PcCounter& c = w.cta->counters[w.pc];
  for (int first = 0; first < kWarpSize; first += lanes_a_phase) {
    uint32_t m = lanes_a_phase == kWarpSize ? mask : mask >> first & ((1u << lanes_a_phase) - 1);
    if (!m) continue;
    uint32_t word[kWarpSize], seen = 0;
    bool conflict = false;
    for (uint32_t k = m; k; k &= k - 1) {
      uint32_t u = offset[first + __builtin_ctz(k)] >> shift, bank = u & (banks - 1);
      if (seen >> bank & 1) {
        conflict |= word[bank] != u;
      } else {
        seen |= 1u << bank;
        word[bank] = u;
      }
    }
    ++c.ideal_wavefronts;
    if (!conflict) {
      ++c.wavefronts;
      continue;
    }
    uint32_t units[kWarpSize], depth[kWarpSize] = {}, worst = 1;
    int n = 0;
    for (uint32_t k = m; k; k &= k - 1) units[n++] = offset[first + __builtin_ctz(k)] >> shift;
    std::sort(units, units + n);
    n = static_cast<int>(std::unique(units, units + n) - units);
    for (int k = 0; k < n; ++k) worst = std::max(worst, ++depth[units[k] & (banks - 1)]);
    c.wavefronts += worst;
  }
}

void count_global(Warp& w, uint32_t mask, const uint64_t* address, int bytes) {
  uint64_t a[kWarpSize];
  int n = 0;
  bool sorted = true;
  for (uint32_t m = mask; m; m &= m - 1) {
    a[n] = address[__builtin_ctz(m)];
    if (n > 0 && a[n] < a[n - 1]) sorted = false;
    ++n;
  }
  if (n == 0) return;
  if (!sorted) std::sort(a, a + n);
  uint64_t sectors = 1, distinct = 1;
  for (int k = 1; k < n; ++k) {
    sectors += a[k] >> 5 != a[k - 1] >> 5;
    distinct += a[k] != a[k - 1];
  }
  PcCounter& c = w.cta->counters[w.pc];
  c.sectors += sectors;
  c.ideal_sectors += (distinct * bytes + 31) / 32;
}

}  // namespace cudasim
