#include "cta.h"

#include <algorithm>
#include <cstring>

namespace cudasim {

void Cta::prepare(const Launch& l) {
  launch = &l;
  program = l.program;
  threads = static_cast<int>(l.block[0] * l.block[1] * l.block[2]);
  const int n_warps = (threads + kWarpSize - 1) / kWarpSize;
  shared_size = program->kernel->static_shared;
  for (const auto& v : program->kernel->shared)
    if (v.dynamic) shared_size = std::max(shared_size, v.offset + l.dynamic_shared);
  if (shared_size == program->kernel->static_shared) shared_size += l.dynamic_shared;
  shared_storage.resize(shared_size + 1024 + 64);
  shared = shared_storage.data() +
           (1024 - reinterpret_cast<uintptr_t>(shared_storage.data()) % 1024) % 1024;
  file_bytes_ = (program->file_bytes + 63) / 64 * 64;
  files_.assign(file_bytes_ * n_warps + 64, 0);
  const int64_t local = program->kernel->local_size;
  locals_.assign(local * kWarpSize * n_warps + 64, 0xFF);
  counters.assign(program->code.size(), PcCounter());
  warps.resize(n_warps);
  uint8_t* base = files_.data() + (64 - reinterpret_cast<uintptr_t>(files_.data()) % 64) % 64;
  for (int i = 0; i < n_warps; ++i) {
    warps[i].id = i;
    warps[i].cta = this;
    warps[i].regs = base + i * file_bytes_;
    warps[i].consts = program->consts;
    warps[i].local = locals_.data() + i * local * kWarpSize;
  }
}

void Cta::begin(uint64_t index) {
  block[0] = static_cast<int>(index % launch->grid[0]);
  block[1] = static_cast<int>(index / launch->grid[0] % launch->grid[1]);
  block[2] = static_cast<int>(index / launch->grid[0] / launch->grid[1]);
  std::memset(shared, 0xFF, shared_size);
  shadow.begin_cta(*this, static_cast<int>(warps.size()), shared_size, program->granule_shift);
  for (auto& b : barriers) {
    b = Barrier();
    b.lanes.assign(warps.size(), 0);
  }
  random.seed(launch->options.seed * 0x9E3779B97F4A7C15ull + index);
  for (auto& w : warps) {
    int lanes = std::min(kWarpSize, threads - w.id * kWarpSize);
    w.live = w.active = lanes == kWarpSize ? kFullMask : (1u << lanes) - 1;
    w.pc = 0;
    w.next_stop = INT_MAX;
    w.carry = 0;
    w.splits.clear();
    w.copies.clear();
    std::fill(w.committed, w.committed + kWarpSize, 0);
    w.last_buffer = nullptr;
    w.blocked = false;
    fill_specials(w);
  }
}

void fill_specials(Warp& w) {
  const Launch& l = *w.cta->launch;
  uint32_t* s = reinterpret_cast<uint32_t*>(w.regs);
  auto set = [&](int which, uint32_t value) {
    std::fill(s + which * kWarpSize, s + (which + 1) * kWarpSize, value);
  };
  for (int lane = 0; lane < kWarpSize; ++lane) {
    uint32_t t = w.id * kWarpSize + lane;
    s[kTidX * kWarpSize + lane] = t % l.block[0];
    s[kTidY * kWarpSize + lane] = t / l.block[0] % l.block[1];
    s[kTidZ * kWarpSize + lane] = t / l.block[0] / l.block[1];
    s[kLaneId * kWarpSize + lane] = lane;
    s[kLanemaskEq * kWarpSize + lane] = 1u << lane;
    s[kLanemaskLt * kWarpSize + lane] = (1u << lane) - 1;
    s[kLanemaskLe * kWarpSize + lane] = ((1u << lane) - 1) | 1u << lane;
    s[kLanemaskGe * kWarpSize + lane] = ~((1u << lane) - 1);
    s[kLanemaskGt * kWarpSize + lane] = ~(((1u << lane) - 1) | 1u << lane);
  }
  for (int d = 0; d < 3; ++d) {
    set(kNtidX + d, l.block[d]);
    set(kCtaidX + d, w.cta->block[d]);
    set(kNctaidX + d, l.grid[d]);
  }
  set(kWarpId, w.id);
  set(kNwarpId, static_cast<uint32_t>(w.cta->warps.size()));
  set(kSmId, static_cast<uint32_t>(w.cta->block[0] % 108));
  set(kNsmId, 108);
  set(kGridId, static_cast<uint32_t>(l.grid_id));
  set(kDynamicSmem, static_cast<uint32_t>(l.dynamic_shared));
  set(kTotalSmem, static_cast<uint32_t>(w.cta->shared_size));
}

bool Cta::run(uint64_t index) {
  begin(index);
  std::vector<int> order(warps.size());
  for (size_t i = 0; i < order.size(); ++i) order[i] = static_cast<int>(i);
  for (bool progress = true; progress;) {
    progress = false;
    bool live = false;
    if (launch->options.seed) std::shuffle(order.begin(), order.end(), random);
    for (int i : order) {
      Warp& w = warps[i];
      if (w.live == 0) continue;
      live = true;
      if (w.blocked) continue;
      uint64_t executed = 0, quantum = launch->options.seed ? 1 + random() % 64 : 1 << 16;
      RunResult result = run_warp(w, quantum, executed);
      if (launch->budget.fetch_sub(static_cast<int64_t>(executed)) <
          static_cast<int64_t>(executed)) {
        report("instruction_limit", w.pc, &w, -1,
               "the launch has executed " + std::to_string(launch->options.max_instructions) +
                   " warp instructions");
        return false;
      }
      if (result == RunResult::kAbort) return false;
      if (executed) progress = true;
      if (result == RunResult::kDone)  // the others no longer wait for it
        for (int b = 0; b < 16; ++b) try_release(b);
    }
    if (!live) {
      finish();
      return true;
    }
    for (auto& w : warps) progress |= w.live != 0 && !w.blocked;
  }
  report_deadlock();
  return false;
}

void Cta::report_deadlock() {
  for (auto& w : warps)
    for (const auto& s : w.splits)
      if (s.state == Split::State::kBarrier) {
        const Barrier& b = barriers[s.barrier];
        report("barrier_deadlock", s.pc, &w, -1,
               "barrier " + std::to_string(s.barrier) + " waits for " +
                   (b.expected < 0 ? "all threads" : std::to_string(b.expected) + " threads") +
                   ", " + std::to_string(b.arrived) + " have arrived, and no warp can run");
      }
}

void Cta::finish() {
  for (auto& w : warps)
    for (auto& c : w.copies) {
      report("cp_async_at_exit", c.pc, &w, c.mask ? __builtin_ctz(c.mask) : -1,
             "the thread exits while this copy is in flight: it never waited for it");
      for (uint32_t m = c.mask; m; m &= m - 1) shadow.forget(c.dst[__builtin_ctz(m)], c.bytes);
    }
  for (int id = 0; id < 16; ++id)
    if (barriers[id].open)
      report("barrier_mismatch", barriers[id].pc, nullptr, -1,
             "the block ends while barrier " + std::to_string(id) +
                 " has arrivals that nobody waited for");
}

void Cta::report(const char* kind, int pc, const Warp* w, int lane, const std::string& message) {
  launch->findings->add(kind, pc, block, w ? w->id : -1,
                        w && lane >= 0 ? w->id * kWarpSize + lane : -1, message);
}

void Cta::arrive(Warp& w, int id, int64_t expected, int reduction, bool wait, uint32_t mask,
                 uint32_t predicate) {
  Barrier& b = barriers[id];
  if (!b.open) {
    b.open = true;
    b.expected = expected;
    b.reduction = reduction;
    b.pc = w.pc;
  } else if (b.expected != expected || (wait && !b.waiters.empty() && b.reduction != reduction)) {
    Finding other;
    describe_location(*program, b.pc, other);
    report("barrier_mismatch", w.pc, &w, -1,
           "barrier " + std::to_string(id) +
               " is used with another thread count or operation than by the warp that came first "
               "(PTX line " +
               std::to_string(other.ptx_line) + ", " + other.source + ")");
  }
  if (wait) b.reduction = reduction;
  if (b.lanes[w.id] & mask)
    report("barrier_overrun", w.pc, &w, -1,
           "the warp arrives twice at barrier " + std::to_string(id) + " before it completes");
  b.lanes[w.id] |= mask;
  b.arrived += __builtin_popcount(mask);
  if ((b.lanes[w.id] & w.live) == w.live) b.arrived += kWarpSize - __builtin_popcount(w.live);
  if (expected >= 0 && b.arrived > expected)
    report("barrier_overrun", w.pc, &w, -1,
           std::to_string(b.arrived) + " threads arrive at barrier " + std::to_string(id) +
               ", which expects " + std::to_string(expected));
  b.popc += __builtin_popcount(mask & predicate);
  b.all = b.all && (mask & ~predicate) == 0;
  b.any = b.any || (mask & predicate) != 0;
  if (std::find(b.arrivers.begin(), b.arrivers.end(), w.id) == b.arrivers.end())
    b.arrivers.push_back(w.id);
  if (wait && std::find(b.waiters.begin(), b.waiters.end(), w.id) == b.waiters.end())
    b.waiters.push_back(w.id);
}

void Cta::try_release(int id) {
  Barrier& b = barriers[id];
  if (!b.open) return;
  if (b.expected >= 0) {
    if (b.arrived < b.expected) return;
  } else {
    for (const auto& w : warps)
      if (w.live & ~b.lanes[w.id]) return;
  }
  shadow.barrier(b.arrivers, b.waiters);
  for (int i : b.waiters) {
    Warp& w = warps[i];
    for (auto& s : w.splits) {
      if (s.state != Split::State::kBarrier || s.barrier != id) continue;
      const Inst& inst = program->code[s.pc];
      if (b.reduction) {
        uint32_t* d = reinterpret_cast<uint32_t*>(w.regs + inst.a[0]);
        if (b.reduction == 1) {
          for (int l = 0; l < kWarpSize; ++l)
            if (s.mask >> l & 1) d[l] = b.popc;
        } else {
          bool value = b.reduction == 2 ? b.all : b.any;
          *d = (*d & ~s.mask) | (value ? s.mask : 0);
        }
      }
      s.state = Split::State::kReady;
      ++s.pc;
    }
    w.blocked = false;
  }
  b = Barrier();
  b.lanes.assign(warps.size(), 0);
}

}  // namespace cudasim
