// Integer arithmetic.
#include <limits>

#include "exec.h"

namespace cudasim {

namespace {

template <class T>
using U = std::make_unsigned_t<T>;
template <class T>
struct Wide {
  using type = std::conditional_t<std::is_signed_v<T>, int64_t, uint64_t>;
};
template <>
struct Wide<int16_t> {
  using type = int32_t;
};
template <>
struct Wide<uint16_t> {
  using type = uint32_t;
};
template <>
struct Wide<int64_t> {
  using type = __int128;
};
template <>
struct Wide<uint64_t> {
  using type = unsigned __int128;
};
template <class T>
using W = typename Wide<T>::type;

// Unsigned arithmetic wraps; 16-bit operands are widened first because they would be promoted to
// int.
template <class T>
using Ring = std::conditional_t<sizeof(T) <= 4, uint32_t, uint64_t>;

struct Add {
  template <class T>
  T operator()(T a, T b) const {
    return T(Ring<T>(a) + Ring<T>(b));
  }
};
struct Sub {
  template <class T>
  T operator()(T a, T b) const {
    return T(Ring<T>(a) - Ring<T>(b));
  }
};
struct MulLo {
  template <class T>
  T operator()(T a, T b) const {
    return T(Ring<T>(a) * Ring<T>(b));
  }
};
struct MulHi {
  template <class T>
  T operator()(T a, T b) const {
    return T(W<T>(a) * W<T>(b) >> (8 * sizeof(T)));
  }
};
struct MulWide {
  template <class T>
  W<T> operator()(T a, T b) const {
    return W<T>(a) * W<T>(b);
  }
};
struct MadLo {
  template <class T>
  T operator()(T a, T b, T c) const {
    return T(Ring<T>(a) * Ring<T>(b) + Ring<T>(c));
  }
};
struct MadHi {
  template <class T>
  T operator()(T a, T b, T c) const {
    return T(Ring<T>(MulHi()(a, b)) + Ring<T>(c));
  }
};
struct MadWide {
  template <class T, class C>
  C operator()(T a, T b, C c) const {
    return C(std::make_unsigned_t<C>(MulWide()(a, b)) + std::make_unsigned_t<C>(c));
  }
};
struct Mul24 {
  template <class T>
  T operator()(T a, T b) const {
    return T(Ring<T>(low(a)) * Ring<T>(low(b)));
  }
  template <class T>
  static T low(T x) {
    return T(Ring<T>(x) << 8) >> 8;
  }
};
struct Mad24 {
  template <class T>
  T operator()(T a, T b, T c) const {
    return T(Ring<T>(Mul24()(a, b)) + Ring<T>(c));
  }
};
struct Sad {
  template <class T>
  T operator()(T a, T b, T c) const {
    return T(Ring<T>(c) + (a < b ? Ring<T>(b) - Ring<T>(a) : Ring<T>(a) - Ring<T>(b)));
  }
};
struct Div {
  template <class T>
  T operator()(T a, T b) const {
    if (b == 0) return T(~T(0));
    if (std::is_signed_v<T> && b == T(-1)) return T(0 - Ring<T>(a));
    return T(a / b);
  }
};
struct Rem {
  template <class T>
  T operator()(T a, T b) const {
    if (b == 0) return a;
    if (std::is_signed_v<T> && b == T(-1)) return 0;
    return T(a % b);
  }
};
struct Abs {
  template <class T>
  T operator()(T a) const {
    return a < T(0) ? T(0 - Ring<T>(a)) : a;
  }
};
struct Neg {
  template <class T>
  T operator()(T a) const {
    return T(0 - Ring<T>(a));
  }
};
struct Min {
  template <class T>
  T operator()(T a, T b) const {
    return a < b ? a : b;
  }
};
struct Max {
  template <class T>
  T operator()(T a, T b) const {
    return a > b ? a : b;
  }
};
struct AddSat {
  int32_t operator()(int32_t a, int32_t b) const { return clamp(int64_t(a) + b); }
  static int32_t clamp(int64_t x) {
    return x > INT32_MAX ? INT32_MAX : x < INT32_MIN ? INT32_MIN : int32_t(x);
  }
};
struct SubSat {
  int32_t operator()(int32_t a, int32_t b) const { return AddSat::clamp(int64_t(a) - b); }
};
struct Popc {
  template <class T>
  uint32_t operator()(T a) const {
    return __builtin_popcountll(U<T>(a));
  }
};
struct Clz {
  template <class T>
  uint32_t operator()(T a) const {
    return a == 0           ? 8 * sizeof(T)
           : sizeof(T) == 8 ? __builtin_clzll(a)
                            : __builtin_clz(uint32_t(a));
  }
};
template <bool kShift>
struct Bfind {
  template <class T>
  uint32_t operator()(T a) const {
    U<T> x = a < T(0) ? U<T>(~a) : U<T>(a);
    if (x == 0) return 0xFFFFFFFFu;
    uint32_t bit = sizeof(T) == 8 ? 63 - __builtin_clzll(x) : 31 - __builtin_clz(uint32_t(x));
    return kShift ? uint32_t(8 * sizeof(T) - 1) - bit : bit;
  }
};
struct Dp4a {
  template <class A, class B>
  static int32_t dot(uint32_t a, uint32_t b, int32_t c) {
    for (int i = 0; i < 4; ++i)
      c = int32_t(uint32_t(c) + uint32_t(int32_t(A(a >> (8 * i))) * int32_t(B(b >> (8 * i)))));
    return c;
  }
};
template <class A, class B>
struct Dp4aOf {
  int32_t operator()(uint32_t a, uint32_t b, int32_t c) const { return Dp4a::dot<A, B>(a, b, c); }
};

bool int_type(Type t) {
  return t != Type::kNone && t != Type::kPred && !is_float(t);
}

template <class F>
bool decode_same2(Decoder& d, const PtxInst& p, Inst& o) {
  Type t = p.type();
  if (!int_type(t)) return false;
  operands(d, p, o, t, {t, t});
  o.fn = pick_binary<F>(t);
  o.cls = InstClass::kInteger;
  return true;
}

template <class F>
bool decode_same1(Decoder& d, const PtxInst& p, Inst& o) {
  Type t = p.type();
  if (!int_type(t)) return false;
  operands(d, p, o, t, {t});
  o.fn = pick_unary<F>(t);
  o.cls = InstClass::kInteger;
  return true;
}

template <class F>
bool decode_count(Decoder& d, const PtxInst& p, Inst& o) {
  Type t = p.type();
  operands(d, p, o, Type::kU32, {t});
  bool wide = size_of(t) == 8;
  if (is_signed(t))
    o.fn = wide ? unary<F, uint32_t, int64_t> : unary<F, uint32_t, int32_t>;
  else
    o.fn = wide ? unary<F, uint32_t, uint64_t> : unary<F, uint32_t, uint32_t>;
  o.cls = InstClass::kInteger;
  return true;
}

bool decode_bfind(Decoder& d, const PtxInst& p, Inst& o) {
  return p.has("shiftamt") ? decode_count<Bfind<true>>(d, p, o)
                           : decode_count<Bfind<false>>(d, p, o);
}

bool decode_add(Decoder& d, const PtxInst& p, Inst& o) {
  if (p.has("cc")) return false;
  if (!decode_same2<Add>(d, p, o)) return false;
  if (p.has("sat")) o.fn = binary<AddSat, int32_t, int32_t>;
  return true;
}

bool decode_sub(Decoder& d, const PtxInst& p, Inst& o) {
  if (p.has("cc")) return false;
  if (!decode_same2<Sub>(d, p, o)) return false;
  if (p.has("sat")) o.fn = binary<SubSat, int32_t, int32_t>;
  return true;
}

Type widened(Type t) {
  switch (t) {
    case Type::kU16:
      return Type::kU32;
    case Type::kS16:
      return Type::kS32;
    case Type::kU32:
      return Type::kU64;
    case Type::kS32:
      return Type::kS64;
    default:
      return Type::kNone;
  }
}

bool decode_mul(Decoder& d, const PtxInst& p, Inst& o) {
  Type t = p.type();
  if (!int_type(t)) return false;
  o.cls = InstClass::kInteger;
  if (p.has("wide")) {
    operands(d, p, o, widened(t), {t, t});
    if (t == Type::kU16) o.fn = binary<MulWide, uint32_t, uint16_t>;
    if (t == Type::kS16) o.fn = binary<MulWide, int32_t, int16_t>;
    if (t == Type::kU32) o.fn = binary<MulWide, uint64_t, uint32_t>;
    if (t == Type::kS32) o.fn = binary<MulWide, int64_t, int32_t>;
    return true;
  }
  operands(d, p, o, t, {t, t});
  o.fn = p.has("hi") ? pick_binary<MulHi>(t) : pick_binary<MulLo>(t);
  return true;
}

bool decode_mad(Decoder& d, const PtxInst& p, Inst& o) {
  Type t = p.type();
  if (!int_type(t)) return false;
  if (p.has("cc")) return false;
  o.cls = InstClass::kInteger;
  if (p.has("wide")) {
    Type wide = widened(t);
    operands(d, p, o, wide, {t, t, wide});
    if (t == Type::kU16) o.fn = ternary<MadWide, uint32_t, uint16_t, uint16_t, uint32_t>;
    if (t == Type::kS16) o.fn = ternary<MadWide, int32_t, int16_t, int16_t, int32_t>;
    if (t == Type::kU32) o.fn = ternary<MadWide, uint64_t, uint32_t, uint32_t, uint64_t>;
    if (t == Type::kS32) o.fn = ternary<MadWide, int64_t, int32_t, int32_t, int64_t>;
    return true;
  }
  operands(d, p, o, t, {t, t, t});
  o.fn = p.has("hi") ? pick_ternary<MadHi>(t) : pick_ternary<MadLo>(t);
  return true;
}

bool decode_24(Decoder& d, const PtxInst& p, Inst& o) {
  Type t = p.type();
  if (p.has("hi")) return false;
  bool mad = p.op == "mad24";
  if (mad)
    operands(d, p, o, t, {t, t, t});
  else
    operands(d, p, o, t, {t, t});
  o.fn = mad ? pick_ternary<Mad24>(t) : pick_binary<Mul24>(t);
  o.cls = InstClass::kInteger;
  return true;
}

bool decode_sad(Decoder& d, const PtxInst& p, Inst& o) {
  Type t = p.type();
  operands(d, p, o, t, {t, t, t});
  o.fn = pick_ternary<Sad>(t);
  o.cls = InstClass::kInteger;
  return true;
}

bool decode_dp4a(Decoder& d, const PtxInst& p, Inst& o) {
  operands(d, p, o, Type::kS32, {Type::kB32, Type::kB32, Type::kS32});
  bool sa = p.type(0) == Type::kS32, sb = p.type(1) == Type::kS32;
  using I = int8_t;
  using N = uint8_t;
  using S = int32_t;
  if (sa)
    o.fn = sb ? ternary<Dp4aOf<I, I>, S, uint32_t, uint32_t, S>
              : ternary<Dp4aOf<I, N>, S, uint32_t, uint32_t, S>;
  else
    o.fn = sb ? ternary<Dp4aOf<N, I>, S, uint32_t, uint32_t, S>
              : ternary<Dp4aOf<N, N>, S, uint32_t, uint32_t, S>;
  o.cls = InstClass::kInteger;
  return true;
}

}  // namespace

void register_integer(DecodeTable& t) {
  t["add"].push_back(decode_add);
  t["sub"].push_back(decode_sub);
  t["mul"].push_back(decode_mul);
  t["mad"].push_back(decode_mad);
  t["mul24"].push_back(decode_24);
  t["mad24"].push_back(decode_24);
  t["sad"].push_back(decode_sad);
  t["div"].push_back(decode_same2<Div>);
  t["rem"].push_back(decode_same2<Rem>);
  t["abs"].push_back(decode_same1<Abs>);
  t["neg"].push_back(decode_same1<Neg>);
  t["min"].push_back(decode_same2<Min>);
  t["max"].push_back(decode_same2<Max>);
  t["popc"].push_back(decode_count<Popc>);
  t["clz"].push_back(decode_count<Clz>);
  t["bfind"].push_back(decode_bfind);
  t["dp4a"].push_back(decode_dp4a);
}

}  // namespace cudasim
