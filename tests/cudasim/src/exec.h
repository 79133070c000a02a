// What every handler uses: operand access and loops over the lanes of a warp.
#pragma once

#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <type_traits>

#include "decoder.h"
#include "inst.h"
#include "warp.h"

namespace cudasim {

template <class T>
inline T* out(Warp& w, int32_t offset) {
  return reinterpret_cast<T*>(w.regs + offset);
}

template <class T>
inline const T* in(const Warp& w, int32_t offset) {
  return reinterpret_cast<const T*>(offset >= 0 ? w.regs + offset
                                                : w.consts + (offset & ~kConstBit));
}

inline uint32_t pred_in(const Warp& w, int32_t offset, bool negated) {
  uint32_t p = *in<uint32_t>(w, offset);
  return negated ? ~p : p;
}

inline void pred_out(Warp& w, int32_t offset, uint32_t mask, uint32_t value) {
  uint32_t* p = out<uint32_t>(w, offset);
  *p = (*p & ~mask) | (value & mask);
}

template <class T, class S>
inline T bit_cast(S s) {
  static_assert(sizeof(T) == sizeof(S));
  T t;
  std::memcpy(&t, &s, sizeof t);
  return t;
}

// d[l] = F()(s[l]...) in the lanes of the mask. A destination may alias a source of the same width,
// never another way, so the iterations are independent.
template <class F, class D, class... S>
inline void lanes(uint32_t mask, D* d, const S*... s) {
  if (mask == kFullMask) {
#pragma GCC ivdep
    for (int l = 0; l < kWarpSize; ++l) d[l] = F()(s[l]...);
  } else {
#pragma GCC ivdep
    for (int l = 0; l < kWarpSize; ++l)
      if (mask >> l & 1) d[l] = F()(s[l]...);
  }
}

template <class F, class D, class A>
Step unary(Warp& w, const Inst& i, uint32_t mask) {
  lanes<F>(mask, out<D>(w, i.a[0]), in<A>(w, i.a[1]));
  return Step::kNext;
}

template <class F, class D, class A, class B = A>
Step binary(Warp& w, const Inst& i, uint32_t mask) {
  lanes<F>(mask, out<D>(w, i.a[0]), in<A>(w, i.a[1]), in<B>(w, i.a[2]));
  return Step::kNext;
}

template <class F, class D, class A, class B = A, class C = B>
Step ternary(Warp& w, const Inst& i, uint32_t mask) {
  lanes<F>(mask, out<D>(w, i.a[0]), in<A>(w, i.a[1]), in<B>(w, i.a[2]), in<C>(w, i.a[3]));
  return Step::kNext;
}

// Places of a destination and of sources with the given types.
inline void operands(Decoder& d, const PtxInst& p, Inst& o, Type dst,
                     std::initializer_list<Type> src) {
  if (p.operands.size() < 1 + src.size()) d.fail("too few operands");
  o.a[0] = d.dst(p.operands[0], dst);
  int n = 1;
  for (Type t : src) {
    o.a[n] = d.src(p.operands[n], t);
    ++n;
  }
}

template <class F>
Handler pick_unary(Type t) {
  switch (t) {
    case Type::kB16:
    case Type::kU16:
      return unary<F, uint16_t, uint16_t>;
    case Type::kS16:
      return unary<F, int16_t, int16_t>;
    case Type::kB32:
    case Type::kU32:
      return unary<F, uint32_t, uint32_t>;
    case Type::kS32:
      return unary<F, int32_t, int32_t>;
    case Type::kB64:
    case Type::kU64:
      return unary<F, uint64_t, uint64_t>;
    case Type::kS64:
      return unary<F, int64_t, int64_t>;
    default:
      return nullptr;
  }
}

template <class F>
Handler pick_binary(Type t) {
  switch (t) {
    case Type::kB16:
    case Type::kU16:
      return binary<F, uint16_t, uint16_t>;
    case Type::kS16:
      return binary<F, int16_t, int16_t>;
    case Type::kB32:
    case Type::kU32:
      return binary<F, uint32_t, uint32_t>;
    case Type::kS32:
      return binary<F, int32_t, int32_t>;
    case Type::kB64:
    case Type::kU64:
      return binary<F, uint64_t, uint64_t>;
    case Type::kS64:
      return binary<F, int64_t, int64_t>;
    default:
      return nullptr;
  }
}

template <class F>
Handler pick_ternary(Type t) {
  switch (t) {
    case Type::kB16:
    case Type::kU16:
      return ternary<F, uint16_t, uint16_t>;
    case Type::kS16:
      return ternary<F, int16_t, int16_t>;
    case Type::kB32:
    case Type::kU32:
      return ternary<F, uint32_t, uint32_t>;
    case Type::kS32:
      return ternary<F, int32_t, int32_t>;
    case Type::kB64:
    case Type::kU64:
      return ternary<F, uint64_t, uint64_t>;
    case Type::kS64:
      return ternary<F, int64_t, int64_t>;
    default:
      return nullptr;
  }
}

}  // namespace cudasim
