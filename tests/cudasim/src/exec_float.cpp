// f32 and f64 arithmetic.
#include <cfenv>
#include <cmath>

#include "exec.h"
#include "half.h"

namespace cudasim {

namespace {

template <bool kFtz>
float f(float x) {
  return kFtz ? flush(x) : x;
}
template <bool kFtz>
double f(double x) {
  return x;
}
template <class T>
T saturate(T x) {
  return x > T(0) ? (x < T(1) ? x : T(1)) : T(0);
}  // NaN gives 0

template <bool Z>
struct Add {
  template <class T>
  T operator()(T a, T b) const {
    return f<Z>(f<Z>(a) + f<Z>(b));
  }
};
template <bool Z>
struct Sub {
  template <class T>
  T operator()(T a, T b) const {
    return f<Z>(f<Z>(a) - f<Z>(b));
  }
};
template <bool Z>
struct Mul {
  template <class T>
  T operator()(T a, T b) const {
    return f<Z>(f<Z>(a) * f<Z>(b));
  }
};
template <bool Z>
struct Fma {
  template <class T>
  T operator()(T a, T b, T c) const {
    return f<Z>(std::fma(f<Z>(a), f<Z>(b), f<Z>(c)));
  }
};
template <bool Z>
struct AddSat {
  template <class T>
  T operator()(T a, T b) const {
    return saturate(Add<Z>()(a, b));
  }
};
template <bool Z>
struct SubSat {
  template <class T>
  T operator()(T a, T b) const {
    return saturate(Sub<Z>()(a, b));
  }
};
template <bool Z>
struct MulSat {
  template <class T>
  T operator()(T a, T b) const {
    return saturate(Mul<Z>()(a, b));
  }
};
template <bool Z>
struct FmaSat {
  template <class T>
  T operator()(T a, T b, T c) const {
    return saturate(Fma<Z>()(a, b, c));
  }
};
template <bool Z>
struct Div {
  template <class T>
  T operator()(T a, T b) const {
    return f<Z>(f<Z>(a) / f<Z>(b));
  }
};
template <bool Z>
struct Abs {
  template <class T>
  T operator()(T a) const {
    return f<Z>(std::fabs(a));
  }
};
template <bool Z>
struct Neg {
  template <class T>
  T operator()(T a) const {
    return f<Z>(-a);
  }
};
template <bool Z>
struct Min {
  template <class T>
  T operator()(T a, T b) const {
    return float_minmax<T, false, false>(f<Z>(a), f<Z>(b));
  }
};
template <bool Z>
struct Max {
  template <class T>
  T operator()(T a, T b) const {
    return float_minmax<T, true, false>(f<Z>(a), f<Z>(b));
  }
};
template <bool Z>
struct MinNan {
  template <class T>
  T operator()(T a, T b) const {
    return float_minmax<T, false, true>(f<Z>(a), f<Z>(b));
  }
};
template <bool Z>
struct MaxNan {
  template <class T>
  T operator()(T a, T b) const {
    return float_minmax<T, true, true>(f<Z>(a), f<Z>(b));
  }
};
struct CopySign {
  template <class T>
  T operator()(T a, T b) const {
    return std::copysign(b, a);
  }
};

// Directed rounding: one lane at a time in the host's rounding mode. The barriers keep the compiler
// from moving the arithmetic out from between the two mode changes.
template <class T>
T opaque(T x) {
  asm volatile("" : "+x"(x)::"memory");
  return x;
}

template <class T, int Op>
Step directed(Warp& w, const Inst& i, uint32_t mask) {
  T* d = out<T>(w, i.a[0]);
  const T *a = in<T>(w, i.a[1]), *b = in<T>(w, i.a[2]), *c = Op == 3 ? in<T>(w, i.a[3]) : nullptr;
  const bool ftz = i.p[1], sat = i.p[2];
  std::fesetround(i.p[0]);
  for (int l = 0; l < kWarpSize; ++l) {
    if (!(mask >> l & 1)) continue;
    T x = opaque(a[l]), y = opaque(b[l]), z = Op == 3 ? opaque(c[l]) : T(0);
    if constexpr (sizeof(T) == 4)
      if (ftz) x = flush(x), y = flush(y), z = flush(z);
    T r = opaque(Op == 0   ? x + y
                 : Op == 1 ? x - y
                 : Op == 2 ? x * y
                 : Op == 3 ? std::fma(x, y, z)
                           : x / y);
    if constexpr (sizeof(T) == 4)
      if (ftz) r = flush(r);
    d[l] = sat ? saturate(r) : r;
  }
  std::fesetround(FE_TONEAREST);
  return Step::kNext;
}

int rounding(const PtxInst& p) {
  return p.has("rz")   ? FE_TOWARDZERO
         : p.has("rm") ? FE_DOWNWARD
         : p.has("rp") ? FE_UPWARD
                       : FE_TONEAREST;
}

bool real(Type t) {
  return t == Type::kF32 || t == Type::kF64;
}

template <template <bool> class F>
Handler pick2(Type t, bool ftz) {
  if (t == Type::kF64) return binary<F<false>, double, double>;
  return ftz ? binary<F<true>, float, float> : binary<F<false>, float, float>;
}
template <template <bool> class F>
Handler pick3(Type t, bool ftz) {
  if (t == Type::kF64) return ternary<F<false>, double, double>;
  return ftz ? ternary<F<true>, float, float> : ternary<F<false>, float, float>;
}
template <template <bool> class F>
Handler pick1(Type t, bool ftz) {
  if (t == Type::kF64) return unary<F<false>, double, double>;
  return ftz ? unary<F<true>, float, float> : unary<F<false>, float, float>;
}

InstClass float_class(Type t) {
  return t == Type::kF64 ? InstClass::kFp64 : InstClass::kFp32;
}

template <template <bool> class F, template <bool> class Sat, int Op>
bool decode_arithmetic(Decoder& d, const PtxInst& p, Inst& o) {
  Type t = p.type();
  if (!real(t)) return false;
  operands(d, p, o, t, {t, t});
  o.cls = float_class(t);
  if (rounding(p) != FE_TONEAREST) {
    o.p[0] = rounding(p);
    o.p[1] = p.has("ftz");
    o.p[2] = p.has("sat");
    o.fn = t == Type::kF64 ? directed<double, Op> : directed<float, Op>;
  } else {
    o.fn = p.has("sat") ? pick2<Sat>(t, p.has("ftz")) : pick2<F>(t, p.has("ftz"));
  }
  return true;
}

bool decode_fma(Decoder& d, const PtxInst& p, Inst& o) {
  Type t = p.type();
  if (!real(t)) return false;
  operands(d, p, o, t, {t, t, t});
  o.cls = float_class(t);
  if (rounding(p) != FE_TONEAREST) {
    o.p[0] = rounding(p);
    o.p[1] = p.has("ftz");
    o.p[2] = p.has("sat");
    o.fn = t == Type::kF64 ? directed<double, 3> : directed<float, 3>;
  } else {
    o.fn = p.has("sat") ? pick3<FmaSat>(t, p.has("ftz")) : pick3<Fma>(t, p.has("ftz"));
  }
  return true;
}

template <template <bool> class F>
bool decode_unary(Decoder& d, const PtxInst& p, Inst& o) {
  Type t = p.type();
  if (!real(t)) return false;
  operands(d, p, o, t, {t});
  o.cls = float_class(t);
  o.fn = pick1<F>(t, p.has("ftz"));
  return true;
}

template <template <bool> class F, template <bool> class Nan>
bool decode_minmax(Decoder& d, const PtxInst& p, Inst& o) {
  Type t = p.type();
  if (!real(t)) return false;
  if (p.has("xorsign") || p.operands.size() != 3) d.fail("min/max with .xorsign or three inputs");
  operands(d, p, o, t, {t, t});
  o.cls = float_class(t);
  o.fn = p.has("NaN") ? pick2<Nan>(t, p.has("ftz")) : pick2<F>(t, p.has("ftz"));
  return true;
}

bool decode_copysign(Decoder& d, const PtxInst& p, Inst& o) {
  Type t = p.type();
  operands(d, p, o, t, {t, t});
  o.cls = float_class(t);
  o.fn = t == Type::kF64 ? binary<CopySign, double, double> : binary<CopySign, float, float>;
  return true;
}

template <class T>
Step test_property(Warp& w, const Inst& i, uint32_t mask) {
  const T* a = in<T>(w, i.a[1]);
  uint32_t r = 0;
  for (int l = 0; l < kWarpSize; ++l) {
    int c = std::fpclassify(a[l]);
    bool yes = i.p[0] == 0   ? std::isfinite(a[l])
               : i.p[0] == 1 ? c == FP_INFINITE
               : i.p[0] == 2 ? c != FP_NAN
               : i.p[0] == 3 ? c == FP_NAN
               : i.p[0] == 4 ? c == FP_NORMAL
                             : c == FP_SUBNORMAL;
    r |= uint32_t(yes) << l;
  }
  pred_out(w, i.a[0], mask, r);
  return Step::kNext;
}

bool decode_testp(Decoder& d, const PtxInst& p, Inst& o) {
  Type t = p.type();
  const char* names[] = {"finite", "infinite", "number", "notanumber", "normal", "subnormal"};
  for (int n = 0; n < 6; ++n)
    if (p.has(names[n])) o.p[0] = n;
  operands(d, p, o, Type::kPred, {t});
  o.cls = InstClass::kCompare;
  o.fn = t == Type::kF64 ? test_property<double> : test_property<float>;
  return true;
}

}  // namespace

void register_float(DecodeTable& t) {
  t["add"].push_back(decode_arithmetic<Add, AddSat, 0>);
  t["sub"].push_back(decode_arithmetic<Sub, SubSat, 1>);
  t["mul"].push_back(decode_arithmetic<Mul, MulSat, 2>);
  t["div"].push_back(decode_arithmetic<Div, Div, 4>);
  t["fma"].push_back(decode_fma);
  t["mad"].push_back(decode_fma);
  t["abs"].push_back(decode_unary<Abs>);
  t["neg"].push_back(decode_unary<Neg>);
  t["min"].push_back(decode_minmax<Min, MinNan>);
  t["max"].push_back(decode_minmax<Max, MaxNan>);
  t["copysign"].push_back(decode_copysign);
  t["testp"].push_back(decode_testp);
}

}  // namespace cudasim
