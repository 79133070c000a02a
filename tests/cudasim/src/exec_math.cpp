// The special function unit and square roots. The .approx forms are computed to about an ulp: the
// hardware's own error is of that size, so results agree within tolerances, not bit for bit.
#include <cmath>

#include "exec.h"
#include "half.h"

namespace cudasim {

namespace {

// 2^x: split into an integer and a rest in [-1/2, 1/2], a Taylor polynomial of 2^rest, two scalings
// so that subnormal results are rounded once.
inline float exp2_approx(float x) {
  float clamped = x > 129.f ? 129.f : (x < -151.f ? -151.f : x);
  float n = std::nearbyint(clamped), r = clamped - n;
  float p = 1.52527338e-5f;  // ln2^7 / 7!
  p = std::fma(p, r, 1.54035304e-4f);
  p = std::fma(p, r, 1.33335581e-3f);
  p = std::fma(p, r, 9.61812911e-3f);
  p = std::fma(p, r, 5.55041087e-2f);
  p = std::fma(p, r, 2.40226507e-1f);
  p = std::fma(p, r, 6.93147181e-1f);
  p = std::fma(p, r, 1.f);
  int32_t k = static_cast<int32_t>(n), half = k >> 1;
  float y = p * bits_float(uint32_t(half + 127) << 23) * bits_float(uint32_t(k - half + 127) << 23);
  return x != x ? x : y;
}

template <bool Z>
float z(float x) {
  return Z ? flush(x) : x;
}
template <bool Z>
double z(double x) {
  return x;
}

template <bool Z>
struct Ex2 {
  float operator()(float a) const { return z<Z>(exp2_approx(z<Z>(a))); }
};
template <bool Z>
struct Lg2 {
  float operator()(float a) const { return z<Z>(std::log2(z<Z>(a))); }
};
template <bool Z>
struct Rcp {
  template <class T>
  T operator()(T a) const {
    return z<Z>(T(1) / z<Z>(a));
  }
};
template <bool Z>
struct Sqrt {
  template <class T>
  T operator()(T a) const {
    return z<Z>(std::sqrt(z<Z>(a)));
  }
};
template <bool Z>
struct Rsqrt {
  template <class T>
  T operator()(T a) const {
    return z<Z>(T(1) / std::sqrt(z<Z>(a)));
  }
};
template <bool Z>
struct Sin {
  float operator()(float a) const { return z<Z>(static_cast<float>(std::sin(double(a)))); }
};
template <bool Z>
struct Cos {
  float operator()(float a) const { return z<Z>(static_cast<float>(std::cos(double(a)))); }
};
template <bool Z>
struct Tanh {
  float operator()(float a) const { return static_cast<float>(std::tanh(double(a))); }
};

template <class H>
struct HalfEx2 {
  uint16_t operator()(uint16_t a) const { return H::down(exp2_approx(H::up(a))); }
};
template <class H>
struct HalfTanh {
  uint16_t operator()(uint16_t a) const { return H::down(float(std::tanh(double(H::up(a))))); }
};
template <class F>
struct Both {  // of a packed pair
  uint32_t operator()(uint32_t a) const {
    return uint32_t(F()(uint16_t(a))) | uint32_t(F()(uint16_t(a >> 16))) << 16;
  }
};

template <template <class> class F>
Handler pick_half(Type t) {
  switch (t) {
    case Type::kF16:
      return unary<F<F16>, uint16_t, uint16_t>;
    case Type::kBF16:
      return unary<F<BF16>, uint16_t, uint16_t>;
    case Type::kF16x2:
      return unary<Both<F<F16>>, uint32_t, uint32_t>;
    case Type::kBF16x2:
      return unary<Both<F<BF16>>, uint32_t, uint32_t>;
    default:
      return nullptr;
  }
}

template <template <bool> class F>
bool decode_f32(Decoder& d, const PtxInst& p, Inst& o) {
  Type t = p.type();
  o.cls = InstClass::kMufu;
  operands(d, p, o, t, {t});
  if (t == Type::kF32)
    o.fn = p.has("ftz") ? unary<F<true>, float, float> : unary<F<false>, float, float>;
  else if (p.op == "ex2")
    o.fn = pick_half<HalfEx2>(t);
  else if (p.op == "tanh")
    o.fn = pick_half<HalfTanh>(t);
  return true;
}

template <template <bool> class F>
bool decode_real(Decoder& d, const PtxInst& p, Inst& o) {
  Type t = p.type();
  o.cls = InstClass::kMufu;
  operands(d, p, o, t, {t});
  if (t == Type::kF64)
    o.fn = unary<F<false>, double, double>;
  else
    o.fn = p.has("ftz") ? unary<F<true>, float, float> : unary<F<false>, float, float>;
  return true;
}

}  // namespace

void register_math(DecodeTable& t) {
  t["ex2"].push_back(decode_f32<Ex2>);
  t["lg2"].push_back(decode_f32<Lg2>);
  t["sin"].push_back(decode_f32<Sin>);
  t["cos"].push_back(decode_f32<Cos>);
  t["tanh"].push_back(decode_f32<Tanh>);
  t["rcp"].push_back(decode_real<Rcp>);
  t["sqrt"].push_back(decode_real<Sqrt>);
  t["rsqrt"].push_back(decode_real<Rsqrt>);
}

}  // namespace cudasim
