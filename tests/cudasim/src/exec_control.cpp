// Branches, barriers, exits and calls of the runtime's own functions.
#include "cta.h"
#include "exec.h"
#include "print.h"

namespace cudasim {

Step warp_sync(Warp& w, const Inst& i, uint32_t mask);

namespace {

Step bra(Warp& w, const Inst&, uint32_t mask) {
  w.taken = mask;
  return Step::kBranch;
}

bool decode_bra(Decoder&, const PtxInst& p, Inst& o) {
  o.cls = InstClass::kBranch;
  o.target = p.targets.at(0);
  o.fn = bra;
  return true;
}

Step brx(Warp& w, const Inst& i, uint32_t mask) {
  const auto& table = w.cta->program->branch_tables[i.p[0]];
  const uint32_t* index = in<uint32_t>(w, i.a[0]);
  const uint32_t stay = w.active & ~mask;
  if (stay) w.splits.push_back({w.pc + 1, stay, Split::State::kReady, -1});
  for (uint32_t m = mask; m;) {
    uint32_t k = index[__builtin_ctz(m)], same = 0;
    for (int l = 0; l < kWarpSize; ++l)
      if (m >> l & 1 && index[l] == k) same |= 1u << l;
    if (k >= table.size()) {
      w.cta->report("branch_out_of_range", w.pc, &w, __builtin_ctz(same),
                    "brx.idx with index " + std::to_string(k));
      return Step::kAbort;
    }
    w.splits.push_back({table[k], same, Split::State::kReady, -1});
    m &= ~same;
  }
  w.active = 0;
  return Step::kMultiway;
}

bool decode_brx(Decoder& d, const PtxInst& p, Inst& o) {
  o.cls = InstClass::kBranch;
  o.a[0] = d.src(p.operands.at(0), 4);
  o.p[0] = d.add_branch_table(p.targets);
  o.fn = brx;
  return true;
}

Step exit_lanes(Warp&, const Inst&, uint32_t) {
  return Step::kExit;
}

bool decode_exit(Decoder&, const PtxInst&, Inst& o) {
  o.cls = InstClass::kBranch;
  o.fn = exit_lanes;
  return true;
}

Step trap(Warp& w, const Inst&, uint32_t mask) {
  w.cta->report("trap", w.pc, &w, __builtin_ctz(mask), "the kernel executes a trap");
  return Step::kAbort;
}

bool decode_trap(Decoder&, const PtxInst&, Inst& o) {
  o.fn = trap;
  return true;
}

Step nothing(Warp&, const Inst&, uint32_t) {
  return Step::kNext;
}

bool decode_nothing(Decoder&, const PtxInst&, Inst& o) {
  o.fn = nothing;
  return true;
}

// Cache policies are opaque, and caches are not modelled.
Step no_policy(Warp& w, const Inst& i, uint32_t mask) {
  for (int l = 0; l < kWarpSize; ++l)
    if (mask >> l & 1) out<uint64_t>(w, i.a[0])[l] = 0;
  return Step::kNext;
}

bool decode_createpolicy(Decoder& d, const PtxInst& p, Inst& o) {
  o.a[0] = d.dst(p.operands.at(0), 8);
  o.fn = no_policy;
  return true;
}

// bar and barrier: a[1] = id, a[2] = thread count (p[1]: there is one), p[0] = reduction, p[2] =
// waits, p[3] = aligned.
Step bar(Warp& w, const Inst& i, uint32_t mask) {
  if (i.p[3] && mask != w.active) {
    w.cta->report("barrier_divergence", w.pc, &w, __builtin_ctz(w.active & ~mask),
                  "a guard keeps part of the warp from this barrier");
    return Step::kAbort;
  }
  if (i.p[3] && mask != w.live) return Step::kWaitLanes;
  const int first = __builtin_ctz(mask);
  const uint32_t id = in<uint32_t>(w, i.a[1])[first];
  if (id > 15) {
    w.cta->report("barrier_mismatch", w.pc, &w, first,
                  "barrier " + std::to_string(id) + " does not exist: there are 16");
    return Step::kAbort;
  }
  int64_t expected = -1;
  if (i.p[1]) {
    expected = in<uint32_t>(w, i.a[2])[first];
    if (expected == 0 || expected % kWarpSize != 0 ||
        expected > int64_t(w.cta->warps.size()) * kWarpSize) {
      w.cta->report("barrier_mismatch", w.pc, &w, first,
                    "a barrier for " + std::to_string(expected) + " threads in a block of " +
                        std::to_string(w.cta->threads));
      return Step::kAbort;
    }
  }
  const bool waits = i.p[2];
  w.cta->arrive(w, static_cast<int>(id), expected, i.p[0], waits, mask,
                i.p[0] ? pred_in(w, i.a[3], i.negate[0]) : 0);
  w.barrier = static_cast<int>(id);
  if (waits) return Step::kBarrier;
  w.cta->try_release(static_cast<int>(id));
  return Step::kNext;
}

bool decode_bar(Decoder& d, const PtxInst& p, Inst& o) {
  const auto& x = p.operands;
  if (p.has("warp")) {
    o.cls = InstClass::kWarpSync;
    o.a[0] = d.src(x.at(0), 4);
    o.fn = warp_sync;
    return true;
  }
  o.cls = InstClass::kBarrier;
  o.p[3] = p.op == "bar" || p.has("aligned");
  o.p[2] = !p.has("arrive");
  size_t k = 0;
  if (p.has("red")) {
    o.p[0] = p.has("popc") ? 1 : p.has("and") ? 2 : 3;
    o.a[0] = d.dst(x.at(k++), o.p[0] == 1 ? Type::kU32 : Type::kPred);
  }
  o.a[1] = d.src(x.at(k++), 4);
  const size_t predicates = o.p[0] ? 1 : 0;
  if (x.size() > k + predicates) {
    o.p[1] = 1;
    o.a[2] = d.src(x.at(k++), 4);
  }
  if (o.p[0]) {
    o.a[3] = d.pred(x.at(k));
    o.negate[0] = x[k].negated;
  }
  o.fn = bar;
  return true;
}

Step call_builtin(Warp& w, const Inst& i, uint32_t mask) {
  for (uint32_t m = mask; m; m &= m - 1) {
    int lane = __builtin_ctz(m);
    const uint8_t* local = w.local + lane * w.cta->program->kernel->local_size;
    if (i.p[0] == 0) {
      device_printf(*w.cta, w, lane, local + i.a[1], local + i.a[2]);
      continue;
    }
    w.cta->report("assertion", w.pc, &w, lane,
                  device_assert_message(*w.cta, local + i.a[1], local + i.a[2], local + i.a[3]));
    return Step::kAbort;
  }
  return Step::kNext;
}

bool decode_call(Decoder& d, const PtxInst& p, Inst& o) {
  const std::string& callee = p.operands.at(1).symbol;
  if (callee != "vprintf" && callee != "__assertfail") d.fail("a call of " + callee);
  o.p[0] = callee == "vprintf" ? 0 : 1;
  const auto& args = p.operands.at(2).items;
  for (size_t k = 0; k < args.size() && k < 4; ++k)
    o.a[1 + k] = static_cast<int32_t>(d.kernel().locals.at(args[k].symbol));
  o.fn = call_builtin;
  return true;
}

}  // namespace

void register_control(DecodeTable& t) {
  t["bra"].push_back(decode_bra);
  t["brx"].push_back(decode_brx);
  t["exit"].push_back(decode_exit);
  t["ret"].push_back(decode_exit);
  t["trap"].push_back(decode_trap);
  t["brkpt"].push_back(decode_nothing);
  t["nanosleep"].push_back(decode_nothing);
  t["membar"].push_back(decode_nothing);
  t["fence"].push_back(decode_nothing);
  t["prefetch"].push_back(decode_nothing);
  t["prefetchu"].push_back(decode_nothing);
  t["applypriority"].push_back(decode_nothing);
  t["discard"].push_back(decode_nothing);
  t["createpolicy"].push_back(decode_createpolicy);
  t["bar"].push_back(decode_bar);
  t["barrier"].push_back(decode_bar);
  t["call"].push_back(decode_call);
}

}  // namespace cudasim
