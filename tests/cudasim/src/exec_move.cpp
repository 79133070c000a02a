// mov, selp and slct: data that changes place only.
#include <chrono>

#include "exec.h"

namespace cudasim {

namespace {

struct Same {
  template <class T>
  T operator()(T a) const {
    return a;
  }
};

Step move_pred(Warp& w, const Inst& i, uint32_t mask) {
  pred_out(w, i.a[0], mask, pred_in(w, i.a[1], i.negate[0]));
  return Step::kNext;
}

// {part, part, ...} to one register and back: p[0] parts of p[1] bytes.
Step pack(Warp& w, const Inst& i, uint32_t mask) {
  const int parts = i.p[0], bytes = i.p[1], whole = parts * bytes;
  uint8_t* d = w.regs + i.a[0];
  for (int k = 0; k < parts; ++k) {
    const uint8_t* s = in<uint8_t>(w, i.a[1 + k]);
    for (int l = 0; l < kWarpSize; ++l)
      if (mask >> l & 1) std::memcpy(d + l * whole + k * bytes, s + l * bytes, bytes);
  }
  return Step::kNext;
}

Step unpack(Warp& w, const Inst& i, uint32_t mask) {
  const int parts = i.p[0], bytes = i.p[1], whole = parts * bytes;
  const uint8_t* s = in<uint8_t>(w, i.a[parts]);
  for (int k = 0; k < parts; ++k) {
    uint8_t* d = w.regs + i.a[k];
    for (int l = 0; l < kWarpSize; ++l)
      if (mask >> l & 1) std::memcpy(d + l * bytes, s + l * whole + k * bytes, bytes);
  }
  return Step::kNext;
}

template <class Half, class Whole>
Step pack2(Warp& w, const Inst& i, uint32_t mask) {
  struct F {
    Whole operator()(Half lo, Half hi) const { return Whole(lo) | Whole(hi) << (8 * sizeof(Half)); }
  };
  lanes<F>(mask, out<Whole>(w, i.a[0]), in<Half>(w, i.a[1]), in<Half>(w, i.a[2]));
  return Step::kNext;
}

template <class Half, class Whole>
Step unpack2(Warp& w, const Inst& i, uint32_t mask) {
  struct Lo {
    Half operator()(Whole x) const { return Half(x); }
  };
  struct Hi {
    Half operator()(Whole x) const { return Half(x >> (8 * sizeof(Half))); }
  };
  lanes<Lo>(mask, out<Half>(w, i.a[0]), in<Whole>(w, i.a[2]));
  lanes<Hi>(mask, out<Half>(w, i.a[1]), in<Whole>(w, i.a[2]));
  return Step::kNext;
}

Step move_clock(Warp& w, const Inst& i, uint32_t mask) {
  uint64_t now = std::chrono::steady_clock::now().time_since_epoch().count();
  for (int l = 0; l < kWarpSize; ++l) {
    if (!(mask >> l & 1)) continue;
    if (i.p[0] == 8)
      out<uint64_t>(w, i.a[0])[l] = now;
    else
      out<uint32_t>(w, i.a[0])[l] = static_cast<uint32_t>(now);
  }
  return Step::kNext;
}

Handler move_of(int size) {
  return size == 8   ? unary<Same, uint64_t, uint64_t>
         : size == 4 ? unary<Same, uint32_t, uint32_t>
                     : unary<Same, uint16_t, uint16_t>;
}

bool decode_mov(Decoder& d, const PtxInst& p, Inst& o) {
  o.cls = InstClass::kMove;
  const Operand &to = p.operands.at(0), &from = p.operands.at(1);
  const int size = size_of(p.type());
  if (p.type() == Type::kPred) {
    o.a[0] = d.dst(to, Type::kPred);
    o.a[1] = d.pred(from);
    o.negate[0] = from.negated;
    o.fn = move_pred;
    return true;
  }
  if (from.kind == Operand::Kind::kVector || to.kind == Operand::Kind::kVector) {
    const bool packing = from.kind == Operand::Kind::kVector;
    const auto& items = packing ? from.items : to.items;
    const int parts = static_cast<int>(items.size()), bytes = size / parts;
    if (bytes < 2) d.fail("mov of a vector of bytes");
    o.p[0] = parts;
    o.p[1] = bytes;
    if (packing) o.a[0] = d.dst(to, size);
    for (int k = 0; k < parts; ++k)
      o.a[packing ? 1 + k : k] = packing ? d.src(items[k], bytes) : d.dst(items[k], bytes);
    if (!packing) o.a[parts] = d.src(from, size);
    o.fn = packing ? pack : unpack;
    if (parts == 2 && size == 8)
      o.fn = packing ? pack2<uint32_t, uint64_t> : unpack2<uint32_t, uint64_t>;
    if (parts == 2 && size == 4)
      o.fn = packing ? pack2<uint16_t, uint32_t> : unpack2<uint16_t, uint32_t>;
    return true;
  }
  o.a[0] = d.dst(to, size);
  if (from.kind == Operand::Kind::kSpecial && from.reg == kClock) {
    o.p[0] = size;
    o.fn = move_clock;
    return true;
  }
  o.a[1] = d.src(from, size);
  o.fn = move_of(size);
  return true;
}

template <class T>
Step select(Warp& w, const Inst& i, uint32_t mask) {
  T* d = out<T>(w, i.a[0]);
  const T *a = in<T>(w, i.a[1]), *b = in<T>(w, i.a[2]);
  const uint32_t p = pred_in(w, i.a[3], i.negate[0]);
#pragma GCC ivdep
  for (int l = 0; l < kWarpSize; ++l) {
    T r = p >> l & 1 ? a[l] : b[l];
    d[l] = mask >> l & 1 ? r : d[l];
  }
  return Step::kNext;
}

bool decode_selp(Decoder& d, const PtxInst& p, Inst& o) {
  Type t = p.type();
  operands(d, p, o, t, {t, t});
  o.a[3] = d.pred(p.operands.at(3));
  o.negate[0] = p.operands[3].negated;
  o.cls = InstClass::kSelect;
  o.fn = size_of(t) == 8 ? select<uint64_t> : size_of(t) == 4 ? select<uint32_t> : select<uint16_t>;
  return true;
}

struct Slct {
  template <class T, class C>
  T operator()(T a, T b, C c) const {
    return c >= C(0) ? a : b;
  }
};

bool decode_slct(Decoder& d, const PtxInst& p, Inst& o) {
  Type t = p.type(0), c = p.type(1);
  operands(d, p, o, t, {t, t, c});
  o.cls = InstClass::kSelect;
  const bool wide = size_of(t) == 8, real = c == Type::kF32;
  if (wide)
    o.fn = real ? ternary<Slct, uint64_t, uint64_t, uint64_t, float>
                : ternary<Slct, uint64_t, uint64_t, uint64_t, int32_t>;
  else
    o.fn = real ? ternary<Slct, uint32_t, uint32_t, uint32_t, float>
                : ternary<Slct, uint32_t, uint32_t, uint32_t, int32_t>;
  return true;
}

}  // namespace

void register_move(DecodeTable& t) {
  t["mov"].push_back(decode_mov);
  t["selp"].push_back(decode_selp);
  t["slct"].push_back(decode_slct);
}

}  // namespace cudasim
