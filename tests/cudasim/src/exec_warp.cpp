// Instructions that read other lanes: shuffles, votes, matches, reductions, __syncwarp.
#include "cta.h"
#include "exec.h"

namespace cudasim {

namespace {

// Runs a *.sync instruction for each group of lanes that name the same members; a[kMembers] holds
// the member masks. The split waits while live members of any group have yet to arrive.
using GroupFn = void (*)(Warp&, const Inst&, uint32_t group);
template <GroupFn kRun, int kMembers>
Step grouped(Warp& w, const Inst& i, uint32_t mask) {
  const uint32_t* members = in<uint32_t>(w, i.a[kMembers]);
  uint32_t groups[kWarpSize];
  int n = 0;
  for (uint32_t rest = mask; rest; rest &= ~groups[n++]) {
    const int first = __builtin_ctz(rest);
    uint32_t group = 0;
    for (int l = first; l < kWarpSize; ++l) group |= uint32_t(members[l] == members[first]) << l;
    group &= mask;
    if (members[first] & w.live & ~group) {
      if (!(members[first] & w.active & ~group)) return Step::kWaitLanes;
      w.cta->report("sync_mask", w.pc, &w, first,
                    "lanes that execute this together name different members");
    }
    if (group & ~members[first]) {
      w.cta->report("sync_mask", w.pc, &w, __builtin_ctz(group & ~members[first]),
                    "the executing lane is not in its own member mask");
    }
    groups[n] = group;
  }
  for (int k = 0; k < n; ++k) kRun(w, i, groups[k]);
  return Step::kNext;
}

void shfl(Warp& w, const Inst& i, uint32_t mask) {
  const uint32_t *a = in<uint32_t>(w, i.a[2]), *b = in<uint32_t>(w, i.a[3]),
                 *c = in<uint32_t>(w, i.a[4]);
  uint32_t result[kWarpSize], valid = 0, inactive = 0;
  for (uint32_t l = 0; l < kWarpSize; ++l) {
    const uint32_t clamp = c[l] & 31, seg = c[l] >> 8 & 31, n = b[l] & 31;
    const uint32_t max = (l & seg) | (clamp & ~seg), min = l & seg;
    int32_t j = 0;
    bool ok = false;
    switch (i.p[0]) {
      case 0:
        j = int32_t(l) - int32_t(n);
        ok = j >= int32_t(max);
        break;  // up: max is the lower bound here
      case 1:
        j = int32_t(l + n);
        ok = j <= int32_t(max);
        break;  // down
      case 2:
        j = int32_t(l ^ n);
        ok = j <= int32_t(max);
        break;  // bfly
      default:
        j = int32_t(min | (n & ~seg));
        ok = j <= int32_t(max);
        break;
    }
    if (!ok) j = int32_t(l);
    result[l] = a[j & 31];
    valid |= uint32_t(ok) << l;
    inactive |= uint32_t(!(mask >> (j & 31) & 1)) << l;
  }
  if (inactive & mask) {
    int lane = __builtin_ctz(inactive & mask);
    w.cta->report("shuffle_inactive_lane", w.pc, &w, lane,
                  "the shuffle reads a lane that does not execute it");
    for (int l = 0; l < kWarpSize; ++l)
      if (inactive >> l & 1) result[l] = kFullMask;
  }
  uint32_t* d = out<uint32_t>(w, i.a[0]);
  for (int l = 0; l < kWarpSize; ++l)
    if (mask >> l & 1) d[l] = result[l];
  pred_out(w, i.a[1], mask, valid);
}

bool decode_shfl(Decoder& d, const PtxInst& p, Inst& o) {
  o.cls = InstClass::kShuffle;
  const auto& x = p.operands;
  o.a[0] = d.dst(x.at(0), 4);
  o.a[1] = d.second(x[0]);
  for (int k = 1; k <= 3; ++k) o.a[1 + k] = d.src(x.at(k), 4);
  o.a[5] = d.src(x.at(4), 4);
  o.p[0] = p.has("up") ? 0 : p.has("down") ? 1 : p.has("bfly") ? 2 : 3;
  o.fn = grouped<shfl, 5>;
  return true;
}

void vote(Warp& w, const Inst& i, uint32_t mask) {
  const uint32_t p = pred_in(w, i.a[1], i.negate[0]) & mask;
  switch (i.p[0]) {
    case 0:
      pred_out(w, i.a[0], mask, p == mask ? kFullMask : 0);
      break;  // all
    case 1:
      pred_out(w, i.a[0], mask, p ? kFullMask : 0);
      break;  // any
    case 2:
      pred_out(w, i.a[0], mask, p == mask || p == 0 ? kFullMask : 0);
      break;  // uni
    default: {
      uint32_t* d = out<uint32_t>(w, i.a[0]);
      for (int l = 0; l < kWarpSize; ++l)
        if (mask >> l & 1) d[l] = p;
    }
  }
}

bool decode_vote(Decoder& d, const PtxInst& p, Inst& o) {
  o.cls = InstClass::kVote;
  o.p[0] = p.has("all") ? 0 : p.has("any") ? 1 : p.has("uni") ? 2 : 3;
  o.a[0] = d.dst(p.operands.at(0), o.p[0] == 3 ? Type::kB32 : Type::kPred);
  o.a[1] = d.pred(p.operands.at(1));
  o.negate[0] = p.operands[1].negated;
  o.a[2] = d.src(p.operands.at(2), 4);
  o.fn = grouped<vote, 2>;
  return true;
}

template <class T>
void match(Warp& w, const Inst& i, uint32_t mask) {
  const T* a = in<T>(w, i.a[2]);
  uint32_t r[kWarpSize] = {}, same = 0;
  for (int l = 0; l < kWarpSize; ++l)
    for (int k = 0; k < kWarpSize; ++k)
      if (mask >> k & 1 && a[k] == a[l]) r[l] |= 1u << k;
  for (int l = 0; l < kWarpSize; ++l) same |= uint32_t(r[l] == mask) << l;
  uint32_t* d = out<uint32_t>(w, i.a[0]);
  for (int l = 0; l < kWarpSize; ++l)
    if (mask >> l & 1) d[l] = i.p[0] ? (same >> l & 1 ? mask : 0) : r[l];
  if (i.p[0]) pred_out(w, i.a[1], mask, same);
}

bool decode_match(Decoder& d, const PtxInst& p, Inst& o) {
  o.cls = InstClass::kVote;
  const int size = size_of(p.type());
  o.p[0] = p.has("all");
  o.a[0] = d.dst(p.operands.at(0), 4);
  o.a[1] = d.second(p.operands[0]);
  o.a[2] = d.src(p.operands.at(1), size);
  o.a[3] = d.src(p.operands.at(2), 4);
  o.fn = size == 8 ? grouped<match<uint64_t>, 3> : grouped<match<uint32_t>, 3>;
  return true;
}

void redux(Warp& w, const Inst& i, uint32_t mask) {
  const uint32_t* a = in<uint32_t>(w, i.a[1]);
  uint32_t r = a[__builtin_ctz(mask)];
  for (uint32_t m = mask & (mask - 1); m; m &= m - 1) {
    uint32_t x = a[__builtin_ctz(m)];
    switch (i.p[0]) {
      case 0:
        r += x;
        break;
      case 1:
        r = i.p[1] ? uint32_t(std::min(int32_t(r), int32_t(x))) : std::min(r, x);
        break;
      case 2:
        r = i.p[1] ? uint32_t(std::max(int32_t(r), int32_t(x))) : std::max(r, x);
        break;
      case 3:
        r &= x;
        break;
      case 4:
        r |= x;
        break;
      default:
        r ^= x;
    }
  }
  uint32_t* d = out<uint32_t>(w, i.a[0]);
  for (int l = 0; l < kWarpSize; ++l)
    if (mask >> l & 1) d[l] = r;
}

bool decode_redux(Decoder& d, const PtxInst& p, Inst& o) {
  if (is_float(p.type())) return false;
  o.cls = InstClass::kShuffle;
  o.p[0] = p.has("add")   ? 0
           : p.has("min") ? 1
           : p.has("max") ? 2
           : p.has("and") ? 3
           : p.has("or")  ? 4
                          : 5;
  o.p[1] = is_signed(p.type());
  o.a[0] = d.dst(p.operands.at(0), 4);
  o.a[1] = d.src(p.operands.at(1), 4);
  o.a[2] = d.src(p.operands.at(2), 4);
  o.fn = grouped<redux, 2>;
  return true;
}

Step activemask(Warp& w, const Inst& i, uint32_t mask) {
  uint32_t* d = out<uint32_t>(w, i.a[0]);
  for (int l = 0; l < kWarpSize; ++l)
    if (mask >> l & 1) d[l] = mask;
  return Step::kNext;
}

bool decode_activemask(Decoder& d, const PtxInst& p, Inst& o) {
  o.cls = InstClass::kVote;
  o.a[0] = d.dst(p.operands.at(0), 4);
  o.fn = activemask;
  return true;
}

}  // namespace

static void sync_group(Warp& w, const Inst&, uint32_t group) {
  w.cta->shadow.warp_sync(w, group, w.live);
}

Step warp_sync(Warp& w, const Inst& i, uint32_t mask) {
  return grouped<sync_group, 0>(w, i, mask);
}

void register_warp(DecodeTable& t) {
  t["shfl"].push_back(decode_shfl);
  t["vote"].push_back(decode_vote);
  t["match"].push_back(decode_match);
  t["redux"].push_back(decode_redux);
  t["activemask"].push_back(decode_activemask);
}

}  // namespace cudasim
