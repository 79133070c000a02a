// f16 and bf16 arithmetic, single and packed. Computed in double and rounded once.
#include "exec.h"
#include "half.h"

namespace cudasim {

namespace {

template <class H>
uint16_t narrow(double x) {
  return H::down(round_to_odd(x));
}

template <class H>
struct Add {
  uint16_t operator()(uint16_t a, uint16_t b) const {
    return narrow<H>(double(H::up(a)) + H::up(b));
  }
};
template <class H>
struct Sub {
  uint16_t operator()(uint16_t a, uint16_t b) const {
    return narrow<H>(double(H::up(a)) - H::up(b));
  }
};
template <class H>
struct Mul {
  uint16_t operator()(uint16_t a, uint16_t b) const {
    return narrow<H>(double(H::up(a)) * H::up(b));
  }
};
template <class H>
struct Fma {
  uint16_t operator()(uint16_t a, uint16_t b, uint16_t c) const {
    return narrow<H>(double(H::up(a)) * H::up(b) + H::up(c));
  }
};
template <class H>
struct FmaRelu {
  uint16_t operator()(uint16_t a, uint16_t b, uint16_t c) const {
    uint16_t r = Fma<H>()(a, b, c);
    return r & 0x8000 ? 0 : r;
  }
};
template <class H>
struct Min {
  uint16_t operator()(uint16_t a, uint16_t b) const {
    return H::down(float_minmax<float, false, false>(H::up(a), H::up(b)));
  }
};
template <class H>
struct Max {
  uint16_t operator()(uint16_t a, uint16_t b) const {
    return H::down(float_minmax<float, true, false>(H::up(a), H::up(b)));
  }
};
template <class H>
struct MinNan {
  uint16_t operator()(uint16_t a, uint16_t b) const {
    return H::down(float_minmax<float, false, true>(H::up(a), H::up(b)));
  }
};
template <class H>
struct MaxNan {
  uint16_t operator()(uint16_t a, uint16_t b) const {
    return H::down(float_minmax<float, true, true>(H::up(a), H::up(b)));
  }
};
template <class H>
struct Abs {
  uint16_t operator()(uint16_t a) const { return a & 0x7FFF; }
};
template <class H>
struct Neg {
  uint16_t operator()(uint16_t a) const { return a ^ 0x8000; }
};

template <class F>
struct Pair {
  template <class... S>
  uint32_t operator()(S... s) const {
    return uint32_t(F()(uint16_t(s)...)) | uint32_t(F()(uint16_t(s >> 16)...)) << 16;
  }
};

bool half(Type t) {
  return t == Type::kF16 || t == Type::kBF16 || t == Type::kF16x2 || t == Type::kBF16x2;
}

template <template <class> class F, int N>
Handler pick(Type t) {
  using H = uint16_t;
  using X = uint32_t;
  if constexpr (N == 1) {
    return t == Type::kF16     ? unary<F<F16>, H, H>
           : t == Type::kBF16  ? unary<F<BF16>, H, H>
           : t == Type::kF16x2 ? unary<Pair<F<F16>>, X, X>
                               : unary<Pair<F<BF16>>, X, X>;
  } else if constexpr (N == 2) {
    return t == Type::kF16     ? binary<F<F16>, H, H>
           : t == Type::kBF16  ? binary<F<BF16>, H, H>
           : t == Type::kF16x2 ? binary<Pair<F<F16>>, X, X>
                               : binary<Pair<F<BF16>>, X, X>;
  } else {
    return t == Type::kF16     ? ternary<F<F16>, H, H>
           : t == Type::kBF16  ? ternary<F<BF16>, H, H>
           : t == Type::kF16x2 ? ternary<Pair<F<F16>>, X, X>
                               : ternary<Pair<F<BF16>>, X, X>;
  }
}

template <template <class> class F, int N>
bool decode(Decoder& d, const PtxInst& p, Inst& o) {
  Type t = p.type();
  if (!half(t)) return false;
  if (p.has("sat") || p.has("oob")) d.fail("half arithmetic with .sat or .oob");
  if (N == 1) operands(d, p, o, t, {t});
  if (N == 2) operands(d, p, o, t, {t, t});
  if (N == 3) operands(d, p, o, t, {t, t, t});
  o.cls = InstClass::kHalf;
  o.fn = pick<F, N>(t);
  return true;
}

bool decode_fma(Decoder& d, const PtxInst& p, Inst& o) {
  return p.has("relu") ? decode<FmaRelu, 3>(d, p, o) : decode<Fma, 3>(d, p, o);
}
bool decode_min(Decoder& d, const PtxInst& p, Inst& o) {
  return p.has("NaN") ? decode<MinNan, 2>(d, p, o) : decode<Min, 2>(d, p, o);
}
bool decode_max(Decoder& d, const PtxInst& p, Inst& o) {
  return p.has("NaN") ? decode<MaxNan, 2>(d, p, o) : decode<Max, 2>(d, p, o);
}

}  // namespace

void register_half(DecodeTable& t) {
  t["add"].push_back(decode<Add, 2>);
  t["sub"].push_back(decode<Sub, 2>);
  t["mul"].push_back(decode<Mul, 2>);
  t["fma"].push_back(decode_fma);
  t["min"].push_back(decode_min);
  t["max"].push_back(decode_max);
  t["abs"].push_back(decode<Abs, 1>);
  t["neg"].push_back(decode<Neg, 1>);
}

}  // namespace cudasim
