#include "warp.h"

#include <algorithm>

#include "cta.h"

namespace cudasim {

void Warp::park(Split::State state, int at_barrier) {
  splits.push_back({pc, active, state, at_barrier});
  active = 0;
}

void Warp::wake_waiting() {
  for (auto& s : splits)
    if (s.state == Split::State::kWaiting) s.state = Split::State::kReady;
}

bool Warp::reschedule() {
  if (active) park(Split::State::kReady);
  for (size_t i = 0; i < splits.size(); ++i) {
    if (splits[i].state == Split::State::kBarrier) continue;
    for (size_t j = i + 1; j < splits.size();) {
      if (splits[j].pc == splits[i].pc && splits[j].state != Split::State::kBarrier) {
        splits[i].mask |= splits[j].mask;
        splits[i].state = Split::State::kReady;
        splits.erase(splits.begin() + j);
      } else {
        ++j;
      }
    }
  }
  int best = -1;
  for (size_t i = 0; i < splits.size(); ++i)
    if (splits[i].state == Split::State::kReady && (best < 0 || splits[i].pc < splits[best].pc))
      best = static_cast<int>(i);
  if (best < 0) return false;
  pc = splits[best].pc;
  active = splits[best].mask;
  splits.erase(splits.begin() + best);
  next_stop = INT_MAX;
  for (const auto& s : splits)
    if (s.state != Split::State::kBarrier && s.pc > pc) next_stop = std::min(next_stop, s.pc);
  return true;
}

namespace {

// __syncwarp calls at different places may meet: releases the lanes that wait at any of them.
bool release_warp_sync(Warp& w) {
  const auto& code = w.cta->program->code;
  uint32_t here = 0;
  for (const auto& s : w.splits)
    if (s.state == Split::State::kWaiting && code[s.pc].cls == InstClass::kWarpSync) here |= s.mask;
  bool any = false;
  uint32_t released = 0;
  for (auto& s : w.splits) {
    if (s.state != Split::State::kWaiting || code[s.pc].cls != InstClass::kWarpSync) continue;
    int32_t o = code[s.pc].a[0];
    const uint32_t* members =
        reinterpret_cast<const uint32_t*>(o >= 0 ? w.regs + o : w.consts + (o & ~kConstBit));
    uint32_t needed = 0;
    for (uint32_t m = s.mask; m; m &= m - 1) needed |= members[__builtin_ctz(m)] & w.live;
    if (needed & ~here) continue;
    released |= s.mask;
    ++s.pc;
    s.state = Split::State::kReady;
    any = true;
  }
  if (any) w.cta->shadow.warp_sync(w, released, w.live);
  return any;
}

RunResult stuck(Warp& w) {
  for (const auto& s : w.splits) {
    const Inst& i = w.cta->program->code[s.pc];
    bool barrier = i.cls == InstClass::kBarrier;
    w.cta->report(
        barrier ? "barrier_divergence" : "warp_divergence", s.pc, &w, __builtin_ctz(s.mask),
        barrier ? "only part of the warp arrives at this barrier; the other lanes never come"
                : "this instruction needs lanes of the warp that never come");
  }
  return RunResult::kAbort;
}

RunResult nothing_ready(Warp& w) {
  if (w.live == 0) return RunResult::kDone;
  bool at_barrier = false;
  for (const auto& s : w.splits) at_barrier |= s.state == Split::State::kBarrier;
  if (at_barrier) {
    w.blocked = true;
    return RunResult::kBlocked;
  }
  return stuck(w);
}

}  // namespace

RunResult run_warp(Warp& w, uint64_t quantum, uint64_t& executed) {
  const Inst* code = w.cta->program->code.data();
  PcCounter* counters = w.cta->counters.data();
  if (!w.active && !w.reschedule()) return nothing_ready(w);
  for (uint64_t n = 0; n < quantum; ++n, ++executed) {
    if (w.pc >= w.next_stop) w.reschedule();
    const Inst& i = code[w.pc];
    ++counters[w.pc].executed;
    uint32_t mask = w.active;
    if (i.guard >= 0) {
      uint32_t p = *reinterpret_cast<const uint32_t*>(w.regs + i.guard);
      mask &= i.guard_negated ? ~p : p;
      if (mask == 0) {
        ++w.pc;
        continue;
      }
    }
    switch (i.fn(w, i, mask)) {
      case Step::kNext:
        ++w.pc;
        continue;
      case Step::kBranch: {
        uint32_t stay = w.active & ~w.taken;
        bool backward = i.target <= w.pc;
        if (stay == 0) {
          w.pc = i.target;
          if (backward && !w.splits.empty()) w.reschedule();
          continue;
        }
        w.splits.push_back({i.target, w.taken, Split::State::kReady, -1});
        w.active = stay;
        ++w.pc;
        w.reschedule();
        continue;
      }
      case Step::kMultiway:
        w.reschedule();
        continue;
      case Step::kWaitLanes:
        --counters[w.pc].executed;  // it will be executed when the others are here
        w.park(Split::State::kWaiting);
        if (w.reschedule()) continue;
        if (release_warp_sync(w) && w.reschedule()) continue;
        break;
      case Step::kBarrier:
        w.park(Split::State::kBarrier, w.barrier);
        w.cta->try_release(w.barrier);
        if (w.reschedule()) continue;
        break;
      case Step::kExit:
        w.live &= ~mask;
        w.active &= ~mask;
        if (w.active) {
          ++w.pc;
          continue;
        }
        w.wake_waiting();
        if (w.reschedule()) continue;
        break;
      case Step::kAbort:
        return RunResult::kAbort;
    }
    ++executed;
    return nothing_ready(w);
  }
  return RunResult::kQuantum;
}

}  // namespace cudasim
