// Extended-precision arithmetic: the carry lives in the warp, one bit a lane.
#include "exec.h"

namespace cudasim {

namespace {

// add.cc, addc, sub.cc, subc, mad.lo.cc, madc.hi, ...: the carry lives in the warp, one bit a lane.
enum CarryOp { kAddC, kSubC, kMadC };
template <class T, int Op>
Step with_carry(Warp& w, const Inst& i, uint32_t mask) {
  using X = std::conditional_t<sizeof(T) == 8, unsigned __int128, uint64_t>;
  const bool take = i.p[0], give = i.p[1], high = i.p[2];
  T* d = out<T>(w, i.a[0]);
  const T *a = in<T>(w, i.a[1]), *b = in<T>(w, i.a[2]),
          *c = Op == kMadC ? in<T>(w, i.a[3]) : nullptr;
  uint32_t carry = w.carry;
  for (int l = 0; l < kWarpSize; ++l) {
    if (!(mask >> l & 1)) continue;
    X cin = take ? carry >> l & 1 : 0, r;
    if (Op == kAddC) {
      r = X(a[l]) + b[l] + cin;
    } else if (Op == kSubC) {
      r = X(a[l]) - b[l] - cin;
    } else {
      X product = X(a[l]) * b[l];
      r = X(high ? T(product >> (8 * sizeof(T))) : T(product)) + c[l] + cin;
    }
    d[l] = T(r);
    if (give) carry = (carry & ~(1u << l)) | uint32_t(r >> (8 * sizeof(T)) & 1) << l;
  }
  w.carry = carry;
  return Step::kNext;
}

template <int Op>
bool decode_carry(Decoder& d, const PtxInst& p, Inst& o) {
  Type t = p.type();
  o.p[0] = p.op.back() == 'c';  // addc, subc, madc
  o.p[1] = p.has("cc");
  o.p[2] = p.has("hi");
  if (Op == kMadC)
    operands(d, p, o, t, {t, t, t});
  else
    operands(d, p, o, t, {t, t});
  if (Op == kMadC && is_signed(t) && p.has("hi")) d.fail("signed mad.hi with carry");
  o.fn = size_of(t) == 8 ? with_carry<uint64_t, Op> : with_carry<uint32_t, Op>;
  o.cls = InstClass::kInteger;
  return true;
}

template <int Op>
bool decode_with_cc(Decoder& d, const PtxInst& p, Inst& o) {
  return (p.has("cc") || p.op.back() == 'c') && decode_carry<Op>(d, p, o);
}

}  // namespace

void register_carry(DecodeTable& t) {
  for (const char* op : {"add", "addc"}) t[op].push_back(decode_with_cc<kAddC>);
  for (const char* op : {"sub", "subc"}) t[op].push_back(decode_with_cc<kSubC>);
  for (const char* op : {"mad", "madc"}) t[op].push_back(decode_with_cc<kMadC>);
}

}  // namespace cudasim
