// Bits: logic, shifts, fields, permutes.
#include "exec.h"

namespace cudasim {

namespace {

struct And {
  template <class T>
  T operator()(T a, T b) const {
    return a & b;
  }
};
struct Or {
  template <class T>
  T operator()(T a, T b) const {
    return a | b;
  }
};
struct Xor {
  template <class T>
  T operator()(T a, T b) const {
    return a ^ b;
  }
};
struct Not {
  template <class T>
  T operator()(T a) const {
    return T(~a);
  }
};
struct Cnot {
  template <class T>
  T operator()(T a) const {
    return a == 0;
  }
};
// Counts clamp at the width: a shift by more gives 0 or the sign.
struct Shl {
  template <class T>
  T operator()(T a, uint32_t n) const {
    return n >= 8 * sizeof(T) ? T(0) : T(a << n);
  }
};
struct Shr {
  template <class T>
  T operator()(T a, uint32_t n) const {
    constexpr uint32_t kBits = 8 * sizeof(T);
    if (std::is_signed_v<T>) return T(a >> (n >= kBits ? kBits - 1 : n));
    return n >= kBits ? T(0) : T(a >> n);
  }
};
struct Brev {
  template <class T>
  T operator()(T a) const {
    T r = 0;
    for (unsigned i = 0; i < 8 * sizeof(T); ++i) r |= T(a >> i & 1) << (8 * sizeof(T) - 1 - i);
    return r;
  }
};
template <bool kLeft, bool kWrap>
struct Funnel {
  uint32_t operator()(uint32_t lo, uint32_t hi, uint32_t count) const {
    uint32_t n = kWrap ? count & 31 : count > 32 ? 32 : count;
    uint64_t both = uint64_t(hi) << 32 | lo;
    return kLeft ? uint32_t(both << n >> 32) : uint32_t(both >> n);
  }
};
struct Bfe {
  template <class T>
  T operator()(T a, uint32_t position, uint32_t length) const {
    constexpr uint32_t kBits = 8 * sizeof(T);
    uint32_t pos = position & 0xFF, len = length & 0xFF;
    using V = std::make_unsigned_t<T>;
    if (len == 0) return 0;
    uint32_t top = pos + len - 1 < kBits - 1 ? pos + len - 1 : kBits - 1;
    bool sign = std::is_signed_v<T> && (V(a) >> top & 1);
    V field = pos >= kBits ? V(0) : V(V(a) >> pos);
    uint32_t have = pos >= kBits ? 0 : kBits - pos;
    uint32_t keep = len < have ? len : have;
    V mask = keep >= kBits ? V(~V(0)) : V((V(1) << keep) - 1);
    return T(sign ? V(field | V(~mask)) : V(field & mask));
  }
};

template <class T>
Step bfi(Warp& w, const Inst& i, uint32_t mask) {
  T* d = out<T>(w, i.a[0]);
  const T *a = in<T>(w, i.a[1]), *b = in<T>(w, i.a[2]);
  const uint32_t *pos = in<uint32_t>(w, i.a[3]), *len = in<uint32_t>(w, i.a[4]);
  constexpr uint32_t kBits = 8 * sizeof(T);
  for (int l = 0; l < kWarpSize; ++l) {
    if (!(mask >> l & 1)) continue;
    uint32_t p = pos[l] & 0xFF, n = len[l] & 0xFF;
    T field = p >= kBits || n == 0 ? T(0) : T((n >= kBits ? T(~T(0)) : T((T(1) << n) - 1)) << p);
    d[l] = (b[l] & ~field) | (p >= kBits ? T(0) : T(T(a[l] << p) & field));
  }
  return Step::kNext;
}

Step lop3(Warp& w, const Inst& i, uint32_t mask) {
  uint32_t m[8];  // the truth table, each bit spread over a word
  for (int k = 0; k < 8; ++k) m[k] = i.p[0] >> k & 1 ? kFullMask : 0;
  uint32_t* d = out<uint32_t>(w, i.a[0]);
  const uint32_t *a = in<uint32_t>(w, i.a[1]), *b = in<uint32_t>(w, i.a[2]),
                 *c = in<uint32_t>(w, i.a[3]);
#pragma GCC ivdep
  for (int l = 0; l < kWarpSize; ++l) {
    uint32_t x = a[l], y = b[l], z = c[l];
    uint32_t r = (~x & ((~y & ((~z & m[0]) | (z & m[1]))) | (y & ((~z & m[2]) | (z & m[3]))))) |
                 (x & ((~y & ((~z & m[4]) | (z & m[5]))) | (y & ((~z & m[6]) | (z & m[7])))));
    d[l] = mask >> l & 1 ? r : d[l];
  }
  return Step::kNext;
}

uint32_t permute(uint32_t a, uint32_t b, uint32_t sel, int mode) {
  uint64_t bytes = uint64_t(b) << 32 | a;
  uint32_t r = 0;
  for (uint32_t k = 0; k < 4; ++k) {
    uint32_t s = sel >> (4 * k) & 0xF, n = sel & 3;
    switch (mode) {
      case 1:
        s = n + k;
        break;  // f4e
      case 2:
        s = (n - k) & 7;
        break;  // b4e
      case 3:
        s = n;
        break;  // rc8
      case 4:
        s = k > n ? k : n;
        break;  // ecl
      case 5:
        s = k < n ? k : n;
        break;  // ecr
      case 6:
        s = (n & 1) * 2 + (k & 1);
        break;  // rc16
      default:
        break;
    }
    uint32_t byte = uint32_t(bytes >> (8 * (s & 7))) & 0xFF;
    if (mode == 0 && s & 8) byte = byte & 0x80 ? 0xFF : 0;
    r |= byte << (8 * k);
  }
  return r;
}

Step prmt(Warp& w, const Inst& i, uint32_t mask) {
  uint32_t* d = out<uint32_t>(w, i.a[0]);
  const uint32_t *a = in<uint32_t>(w, i.a[1]), *b = in<uint32_t>(w, i.a[2]),
                 *c = in<uint32_t>(w, i.a[3]);
  for (int l = 0; l < kWarpSize; ++l)
    if (mask >> l & 1) d[l] = permute(a[l], b[l], c[l], i.p[0]);
  return Step::kNext;
}

template <int Op>
Step pred_logic(Warp& w, const Inst& i, uint32_t mask) {
  uint32_t a = pred_in(w, i.a[1], i.negate[0]), b = pred_in(w, i.a[2], i.negate[1]);
  pred_out(w, i.a[0], mask, Op == 0 ? a & b : Op == 1 ? a | b : a ^ b);
  return Step::kNext;
}

Step pred_not(Warp& w, const Inst& i, uint32_t mask) {
  pred_out(w, i.a[0], mask, ~pred_in(w, i.a[1], i.negate[0]));
  return Step::kNext;
}

Type bits(Type t) {
  return size_of(t) == 8 ? Type::kB64 : size_of(t) == 4 ? Type::kB32 : Type::kB16;
}

template <class F, int Op>
bool decode_logic(Decoder& d, const PtxInst& p, Inst& o) {
  o.cls = InstClass::kLogic;
  if (p.type() == Type::kPred) {
    o.a[0] = d.dst(p.operands[0], Type::kPred);
    for (int k = 1; k <= 2; ++k) {
      o.a[k] = d.pred(p.operands[k]);
      o.negate[k - 1] = p.operands[k].negated;
    }
    o.fn = pred_logic<Op>;
    return true;
  }
  Type t = bits(p.type());
  operands(d, p, o, t, {t, t});
  o.fn = pick_binary<F>(t);
  return true;
}

bool decode_not(Decoder& d, const PtxInst& p, Inst& o) {
  o.cls = InstClass::kLogic;
  if (p.type() == Type::kPred) {
    o.a[0] = d.dst(p.operands[0], Type::kPred);
    o.a[1] = d.pred(p.operands[1]);
    o.negate[0] = p.operands[1].negated;
    o.fn = pred_not;
    return true;
  }
  Type t = bits(p.type());
  operands(d, p, o, t, {t});
  o.fn = p.op == "cnot" ? pick_unary<Cnot>(t) : pick_unary<Not>(t);
  return true;
}

template <class F>
bool decode_shift(Decoder& d, const PtxInst& p, Inst& o) {
  Type t = p.type();
  operands(d, p, o, t, {t, Type::kU32});
  switch (t) {
    case Type::kB16:
    case Type::kU16:
      o.fn = binary<F, uint16_t, uint16_t, uint32_t>;
      break;
    case Type::kS16:
      o.fn = binary<F, int16_t, int16_t, uint32_t>;
      break;
    case Type::kB32:
    case Type::kU32:
      o.fn = binary<F, uint32_t, uint32_t, uint32_t>;
      break;
    case Type::kS32:
      o.fn = binary<F, int32_t, int32_t, uint32_t>;
      break;
    case Type::kB64:
    case Type::kU64:
      o.fn = binary<F, uint64_t, uint64_t, uint32_t>;
      break;
    case Type::kS64:
      o.fn = binary<F, int64_t, int64_t, uint32_t>;
      break;
    default:
      return false;
  }
  o.cls = InstClass::kLogic;
  return true;
}

bool decode_shf(Decoder& d, const PtxInst& p, Inst& o) {
  operands(d, p, o, Type::kB32, {Type::kB32, Type::kB32, Type::kU32});
  bool wrap = p.has("wrap");
  using N = uint32_t;
  if (p.has("l"))
    o.fn = wrap ? ternary<Funnel<true, true>, N, N> : ternary<Funnel<true, false>, N, N>;
  else
    o.fn = wrap ? ternary<Funnel<false, true>, N, N> : ternary<Funnel<false, false>, N, N>;
  o.cls = InstClass::kLogic;
  return true;
}

bool decode_brev(Decoder& d, const PtxInst& p, Inst& o) {
  Type t = bits(p.type());
  operands(d, p, o, t, {t});
  o.fn = pick_unary<Brev>(t);
  o.cls = InstClass::kLogic;
  return true;
}

bool decode_bfe(Decoder& d, const PtxInst& p, Inst& o) {
  Type t = p.type();
  operands(d, p, o, t, {t, Type::kU32, Type::kU32});
  if (t == Type::kU32) o.fn = ternary<Bfe, uint32_t, uint32_t, uint32_t, uint32_t>;
  if (t == Type::kS32) o.fn = ternary<Bfe, int32_t, int32_t, uint32_t, uint32_t>;
  if (t == Type::kU64) o.fn = ternary<Bfe, uint64_t, uint64_t, uint32_t, uint32_t>;
  if (t == Type::kS64) o.fn = ternary<Bfe, int64_t, int64_t, uint32_t, uint32_t>;
  o.cls = InstClass::kLogic;
  return true;
}

bool decode_bfi(Decoder& d, const PtxInst& p, Inst& o) {
  Type t = bits(p.type());
  operands(d, p, o, t, {t, t, Type::kU32, Type::kU32});
  o.fn = t == Type::kB64 ? bfi<uint64_t> : bfi<uint32_t>;
  o.cls = InstClass::kLogic;
  return true;
}

bool decode_lop3(Decoder& d, const PtxInst& p, Inst& o) {
  if (p.operands.size() != 5 || p.operands[4].kind != Operand::Kind::kInt)
    return false;  // not the form with a predicate
  operands(d, p, o, Type::kB32, {Type::kB32, Type::kB32, Type::kB32});
  o.p[0] = static_cast<int32_t>(p.operands[4].imm);
  o.fn = lop3;
  o.cls = InstClass::kLogic;
  return true;
}

bool decode_prmt(Decoder& d, const PtxInst& p, Inst& o) {
  operands(d, p, o, Type::kB32, {Type::kB32, Type::kB32, Type::kB32});
  const char* modes[] = {"", "f4e", "b4e", "rc8", "ecl", "ecr", "rc16"};
  for (int m = 1; m < 7; ++m)
    if (p.has(modes[m])) o.p[0] = m;
  o.fn = prmt;
  o.cls = InstClass::kLogic;
  return true;
}

}  // namespace

void register_logic(DecodeTable& t) {
  t["and"].push_back(decode_logic<And, 0>);
  t["or"].push_back(decode_logic<Or, 1>);
  t["xor"].push_back(decode_logic<Xor, 2>);
  t["not"].push_back(decode_not);
  t["cnot"].push_back(decode_not);
  t["shl"].push_back(decode_shift<Shl>);
  t["shr"].push_back(decode_shift<Shr>);
  t["shf"].push_back(decode_shf);
  t["brev"].push_back(decode_brev);
  t["bfe"].push_back(decode_bfe);
  t["bfi"].push_back(decode_bfi);
  t["lop3"].push_back(decode_lop3);
  t["prmt"].push_back(decode_prmt);
}

}  // namespace cudasim
