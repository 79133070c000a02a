// cp.async. The copy happens when its thread waits for it: until then the destination holds NaN and
// counts as in flight.
#include "access.h"
#include "cta.h"

namespace cudasim {

namespace {

// a[0] = destination base, a[1] = source base, a[2] = source size or ignore-src; p[0] = bytes, p[1]
// = destination base bytes | source base bytes << 8, p[2] = kind of a[2] (0 none, 1 size, 2
// predicate), p[3] = destination immediate; imm = source's.
Step issue(Warp& w, const Inst& i, uint32_t mask) {
  const int bytes = i.p[0];
  uint64_t to[kWarpSize];
  AsyncCopy copy;
  lane_addresses(w, i.a[0], i.p[1] & 0xFF, i.p[3], to);
  lane_addresses(w, i.a[1], i.p[1] >> 8, i.imm, copy.src);
  uint32_t with_source = mask;
  for (int l = 0; l < kWarpSize; ++l) {
    uint32_t n = bytes;
    if (i.p[2] == 1) n = in<uint32_t>(w, i.a[2])[l];
    if (i.p[2] == 2 && (pred_in(w, i.a[2], i.negate[0]) >> l & 1)) n = 0;
    if (n > uint32_t(bytes)) {
      if (mask >> l & 1)
        w.cta->report("cp_async_size", w.pc, &w, l, "a source size larger than the copy");
      n = bytes;
    }
    copy.src_bytes[l] = static_cast<uint8_t>(n);
    if (n == 0) with_source &= ~(1u << l);
    copy.group[l] = w.committed[l];
  }
  uint32_t ok = check_shared(w, mask, to, bytes, copy.dst);
  uint32_t readable = with_source;
  if (i.p[2] == 0) {
    readable = check_global(w, with_source, copy.src, bytes, false);
  } else {
    readable = 0;  // partial sources: each lane for itself, bounds by the bytes that are read,
                   // alignment by the copy's size
    uint32_t whole = 0;
    for (uint32_t m = with_source; m; m &= m - 1)
      if (copy.src_bytes[__builtin_ctz(m)] == bytes) whole |= m & -m;
    if (whole) readable |= check_global(w, whole, copy.src, bytes, false);
    for (uint32_t m = with_source & ~whole; m; m &= m - 1) {
      int l = __builtin_ctz(m);
      if (copy.src[l] % bytes)
        w.cta->report("misaligned_address", w.pc, &w, l,
                      "the source of a cp.async is not a multiple of its size");
      else if (w.cta->launch->buffers->find(copy.src[l], copy.src_bytes[l]) ||
               !w.cta->launch->options.strict_memory)
        readable |= 1u << l;
      else
        w.cta->report("global_out_of_bounds", w.pc, &w, l,
                      "the source of a cp.async, " + w.cta->launch->buffers->describe(copy.src[l]));
    }
  }
  count_shared(w, ok, copy.dst, bytes);
  if (with_source) count_global(w, with_source, copy.src, bytes);
  w.cta->shadow.issue(w, w.pc, ok, copy.dst, bytes);
  for (uint32_t m = ok; m; m &= m - 1)
    std::memset(w.cta->shared + copy.dst[__builtin_ctz(m)], 0xFF, bytes);
  copy.mask = ok & (readable | ~with_source);
  for (uint32_t m = ok & ~copy.mask; m;
       m &= m - 1) {  // refused sources leave NaN, not a copy in flight
    int l = __builtin_ctz(m);
    w.cta->shadow.complete(w, l, copy.dst[l], bytes);
  }
  copy.bytes = bytes;
  copy.pc = w.pc;
  if (copy.mask) w.copies.push_back(copy);
  return Step::kNext;
}

void finish_lane(Warp& w, AsyncCopy& c, int lane) {
  uint8_t* to = w.cta->shared + c.dst[lane];
  const int n = c.src_bytes[lane];
  if (n) std::memcpy(to, reinterpret_cast<const void*>(c.src[lane]), n);
  if (n < c.bytes) std::memset(to + n, 0, c.bytes - n);
  w.cta->shadow.complete(w, lane, c.dst[lane], c.bytes);
}

Step commit(Warp& w, const Inst&, uint32_t mask) {
  for (int l = 0; l < kWarpSize; ++l) w.committed[l] += mask >> l & 1;
  return Step::kNext;
}

// Completes all but the p[0] newest committed groups of each lane; p[1]: everything, committed or
// not.
Step wait(Warp& w, const Inst& i, uint32_t mask) {
  const uint32_t pending = static_cast<uint32_t>(i.p[0]);
  size_t kept = 0;
  for (size_t k = 0; k < w.copies.size(); ++k) {
    AsyncCopy& c = w.copies[k];
    for (uint32_t m = c.mask & mask; m; m &= m - 1) {
      int l = __builtin_ctz(m);
      if (!i.p[1] && c.group[l] + pending >= w.committed[l]) continue;
      finish_lane(w, c, l);
      c.mask &= ~(1u << l);
    }
    if (c.mask) {
      if (kept != k) w.copies[kept] = c;
      ++kept;
    }
  }
  w.copies.resize(kept);
  return Step::kNext;
}

bool decode_copy(Decoder& d, const PtxInst& p, Inst& o) {
  const auto& x = p.operands;
  o.cls = InstClass::kCpAsync;
  o.p[0] = static_cast<int32_t>(x.at(2).imm);
  if (o.p[0] != 4 && o.p[0] != 8 && o.p[0] != 16)
    d.fail("cp.async of " + std::to_string(o.p[0]) + " bytes");
  const int to_bytes = d.address(x.at(0), o, 0);
  o.p[3] = static_cast<int32_t>(o.imm);
  const int from_bytes = d.address(x.at(1), o, 1);
  o.p[1] = to_bytes | from_bytes << 8;
  if (x.size() > 3) {
    const Operand& extra = x[3];
    const int size = d.register_size(extra);
    const bool predicate =
        extra.kind == Operand::Kind::kReg && d.kernel().registers[extra.reg].type == Type::kPred;
    if (predicate) {
      o.p[2] = 2;
      o.a[2] = d.pred(extra);
      o.negate[0] = extra.negated;
    } else if (size != 8) {  // 64 bits: a cache policy
      o.p[2] = 1;
      o.a[2] = d.src(extra, 4);
    }
  }
  o.fn = issue;
  return true;
}

bool decode_cp(Decoder& d, const PtxInst& p, Inst& o) {
  if (!p.has("async") || p.has("bulk") || p.has("mbarrier")) return false;
  o.cls = InstClass::kCpAsync;
  if (p.has("commit_group")) {
    o.fn = commit;
  } else if (p.has("wait_group")) {
    o.p[0] = static_cast<int32_t>(p.operands.at(0).imm);
    o.fn = wait;
  } else if (p.has("wait_all")) {
    o.p[1] = 1;
    o.fn = wait;
  } else {
    return decode_copy(d, p, o);
  }
  return true;
}

}  // namespace

void register_async(DecodeTable& t) {
  t["cp"].push_back(decode_cp);
}

}  // namespace cudasim
