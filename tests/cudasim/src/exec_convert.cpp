// cvt and cvta.
#include <cmath>

#include "exec.h"
#include "half.h"
#include "memory.h"

namespace cudasim {

namespace {

enum Round : int { kNearest, kZero, kDown, kUp };

Round rounding(const PtxInst& p, Round otherwise) {
  if (p.has("rn") || p.has("rni")) return kNearest;
  if (p.has("rz") || p.has("rzi")) return kZero;
  if (p.has("rm") || p.has("rmi")) return kDown;
  if (p.has("rp") || p.has("rpi")) return kUp;
  return otherwise;
}

double to_integral(double x, int mode) {
  return mode == kNearest ? std::nearbyint(x)
         : mode == kZero  ? std::trunc(x)
         : mode == kDown  ? std::floor(x)
                          : std::ceil(x);
}

// Registers may be wider than the type: the low bits count.
int64_t read_int(const Warp& w, int32_t offset, int register_bytes, int lane, Type t) {
  uint64_t raw = register_bytes == 8   ? in<uint64_t>(w, offset)[lane]
                 : register_bytes == 4 ? in<uint32_t>(w, offset)[lane]
                                       : in<uint16_t>(w, offset)[lane];
  int shift = 64 - 8 * size_of(t);
  return is_signed(t) ? int64_t(raw << shift) >> shift : int64_t(raw << shift >> shift);
}

double read_float(const Warp& w, int32_t offset, int lane, Type t, bool ftz) {
  switch (t) {
    case Type::kF64:
      return in<double>(w, offset)[lane];
    case Type::kF16:
      return f16_to_f32(in<uint16_t>(w, offset)[lane]);
    case Type::kBF16:
      return bf16_to_f32(in<uint16_t>(w, offset)[lane]);
    default:
      return ftz ? flush(in<float>(w, offset)[lane]) : in<float>(w, offset)[lane];
  }
}

void write_int(Warp& w, int32_t offset, int register_bytes, int lane, Type t, uint64_t value) {
  int shift = 64 - 8 * size_of(t);  // the register gets the type's value, extended by its sign
  value = is_signed(t) ? uint64_t(int64_t(value << shift) >> shift) : value << shift >> shift;
  if (register_bytes == 8)
    out<uint64_t>(w, offset)[lane] = value;
  else if (register_bytes == 4)
    out<uint32_t>(w, offset)[lane] = static_cast<uint32_t>(value);
  else
    out<uint16_t>(w, offset)[lane] = static_cast<uint16_t>(value);
}

float directed_float(double x, int mode) {
  float f = static_cast<float>(x);
  if (mode == kNearest || double(f) == x || std::isnan(x)) return f;
  if (mode == kZero && std::fabs(double(f)) > std::fabs(x)) return std::nextafter(f, 0.f);
  if (mode == kDown && double(f) > x) return std::nextafter(f, -INFINITY);
  if (mode == kUp && double(f) < x) return std::nextafter(f, INFINITY);
  return f;
}

uint16_t narrow_half(double x, bool bf16, int mode) {
  float odd = round_to_odd(x);
  if (mode == kZero) return bf16 ? f32_to_bf16_rz(odd) : f32_to_f16_rz(odd);
  return bf16 ? f32_to_bf16(odd) : f32_to_f16(odd);
}

void write_float(Warp& w, int32_t offset, int lane, Type t, double x, int mode, bool ftz) {
  switch (t) {
    case Type::kF64:
      out<double>(w, offset)[lane] = x;
      break;
    case Type::kF16:
      out<uint16_t>(w, offset)[lane] = narrow_half(x, false, mode);
      break;
    case Type::kBF16:
      out<uint16_t>(w, offset)[lane] = narrow_half(x, true, mode);
      break;
    default: {
      float f = directed_float(x, mode);
      out<float>(w, offset)[lane] = ftz ? flush(f) : f;
    }
  }
}

// 64-bit integers do not fit a double: rounded to odd there, so that the second rounding is right.
double int_to_double(int64_t v, bool is_signed_type) {
  double d = is_signed_type ? double(v) : double(uint64_t(v));
  bool exact = is_signed_type ? __int128(d) == __int128(v) : __int128(d) == __int128(uint64_t(v));
  if (exact) return d;
  uint64_t bits = bit_cast<uint64_t>(d);
  bool away = is_signed_type ? (v > 0 ? __int128(d) > v : __int128(d) < v)
                             : __int128(d) > __int128(uint64_t(v));
  return bit_cast<double>((away ? bits - 1 : bits) | 1);
}

// The general form: p = {destination type, source type, rounding, flags}, a[2], a[3] = register
// widths.
enum Flag : int { kFtzFlag = 1, kSatFlag = 2, kReluFlag = 4, kIntegral = 8 };

uint64_t float_to_int(double x, Type t, int mode) {
  if (std::isnan(x)) return size_of(t) == 8 ? 0x8000000000000000ull : 0;
  x = to_integral(x, mode);
  int bits = 8 * size_of(t);
  double low = is_signed(t) ? -std::ldexp(1.0, bits - 1) : 0.0,
         high = std::ldexp(1.0, is_signed(t) ? bits - 1 : bits);
  if (x < low) return is_signed(t) ? uint64_t(1) << (bits - 1) : 0;
  if (x >= high)
    return is_signed(t) ? (uint64_t(1) << (bits - 1)) - 1
           : bits == 64 ? ~0ull
                        : (uint64_t(1) << bits) - 1;
  return is_signed(t) ? uint64_t(int64_t(x)) : uint64_t(x);
}

uint64_t saturate_int(int64_t v, Type from, Type to) {
  __int128 x = is_signed(from) ? __int128(v) : __int128(uint64_t(v));
  int bits = 8 * size_of(to);
  __int128 low = is_signed(to) ? -(__int128(1) << (bits - 1)) : 0;
  __int128 high = is_signed(to) ? (__int128(1) << (bits - 1)) - 1 : (__int128(1) << bits) - 1;
  return uint64_t(x < low ? low : x > high ? high : x);
}

Step convert(Warp& w, const Inst& i, uint32_t mask) {
  const Type to = Type(i.p[0]), from = Type(i.p[1]);
  const int mode = i.p[2], flags = i.p[3];
  for (int l = 0; l < kWarpSize; ++l) {
    if (!(mask >> l & 1)) continue;
    if (!is_float(from)) {
      int64_t v = read_int(w, i.a[1], i.a[3], l, from);
      if (!is_float(to)) {
        write_int(w, i.a[0], i.a[2], l, to,
                  flags & kSatFlag ? saturate_int(v, from, to) : uint64_t(v));
      } else if (to == Type::kF64) {
        out<double>(w, i.a[0])[l] = is_signed(from) ? double(v) : double(uint64_t(v));
      } else {
        write_float(w, i.a[0], l, to, int_to_double(v, is_signed(from)), mode, false);
      }
      continue;
    }
    double x = read_float(w, i.a[1], l, from, flags & kFtzFlag);
    if (!is_float(to)) {
      write_int(w, i.a[0], i.a[2], l, to, float_to_int(x, to, mode));
      continue;
    }
    if (flags & kIntegral) x = to_integral(x, mode);
    if (flags & kSatFlag) x = x > 0 ? (x < 1 ? x : 1) : 0;
    if (flags & kReluFlag) x = x > 0 ? x : x != x ? x : 0;
    write_float(w, i.a[0], l, to, x, flags & kIntegral ? int(kNearest) : mode, flags & kFtzFlag);
  }
  return Step::kNext;
}

// Common forms, vectorised.
template <class D>
struct CastTo {
  template <class A>
  D operator()(A a) const {
    return static_cast<D>(a);
  }
};
template <class H>
struct Up {
  float operator()(uint16_t a) const { return H::up(a); }
};
template <class H>
struct Down {
  uint16_t operator()(float a) const { return H::down(a); }
};
template <class H, bool kRelu>
struct Down2 {  // the first source goes to the upper half
  uint32_t operator()(float a, float b) const { return uint32_t(one(a)) << 16 | one(b); }
  static uint16_t one(float x) { return H::down(kRelu && x < 0 ? 0.f : x); }
};
struct ToTf32 {  // rna: to nearest, ties away from zero
  uint32_t operator()(float a) const {
    uint32_t bits = float_bits(a);
    return (bits & 0x7F800000u) == 0x7F800000u ? bits : (bits + 0x1000u) & 0xFFFFE000u;
  }
};
struct Bf16x2Rz {
  uint32_t operator()(float a, float b) const {
    return uint32_t(f32_to_bf16_rz(a)) << 16 | f32_to_bf16_rz(b);
  }
};
struct F16x2Rz {
  uint32_t operator()(float a, float b) const {
    return uint32_t(f32_to_f16_rz(a)) << 16 | f32_to_f16_rz(b);
  }
};

Handler fast_form(Type to, Type from, int to_bytes, int from_bytes) {
  const bool exact_width = to_bytes == size_of(to) && from_bytes == size_of(from);
  if (!exact_width) return nullptr;
  if (to == Type::kF32 && from == Type::kF16) return unary<Up<F16>, float, uint16_t>;
  if (to == Type::kF32 && from == Type::kBF16) return unary<Up<BF16>, float, uint16_t>;
  if (to == Type::kF16 && from == Type::kF32) return unary<Down<F16>, uint16_t, float>;
  if (to == Type::kBF16 && from == Type::kF32) return unary<Down<BF16>, uint16_t, float>;
  if (to == Type::kF32 && from == Type::kS32) return unary<CastTo<float>, float, int32_t>;
  if (to == Type::kF32 && from == Type::kU32) return unary<CastTo<float>, float, uint32_t>;
  if (to == Type::kF64 && from == Type::kF32) return unary<CastTo<double>, double, float>;
  if (is_float(to) || is_float(from)) return nullptr;
  if (to_bytes == 8 && from == Type::kS32) return unary<CastTo<int64_t>, int64_t, int32_t>;
  if (to_bytes == 8 && from_bytes == 4) return unary<CastTo<uint64_t>, uint64_t, uint32_t>;
  if (to_bytes == 4 && from_bytes == 8) return unary<CastTo<uint32_t>, uint32_t, uint64_t>;
  if (to_bytes == 2 && from_bytes == 4) return unary<CastTo<uint16_t>, uint16_t, uint32_t>;
  if (to_bytes == 4 && from == Type::kS16) return unary<CastTo<int32_t>, int32_t, int16_t>;
  if (to_bytes == 4 && from_bytes == 2) return unary<CastTo<uint32_t>, uint32_t, uint16_t>;
  return nullptr;
}

bool decode_pair(Decoder& d, const PtxInst& p, Inst& o, bool bf16) {
  operands(d, p, o, Type::kB32, {Type::kF32, Type::kF32});
  const bool relu = p.has("relu"), rz = p.has("rz");
  if (rz && relu) d.fail("cvt.rz.relu of a pair");
  using N = uint32_t;
  if (rz)
    o.fn = bf16 ? binary<Bf16x2Rz, N, float> : binary<F16x2Rz, N, float>;
  else if (bf16)
    o.fn = relu ? binary<Down2<BF16, true>, N, float> : binary<Down2<BF16, false>, N, float>;
  else
    o.fn = relu ? binary<Down2<F16, true>, N, float> : binary<Down2<F16, false>, N, float>;
  return true;
}

bool decode_cvt(Decoder& d, const PtxInst& p, Inst& o) {
  const Type to = p.type(0), from = p.type(1);
  o.cls = InstClass::kConvert;
  if (p.has("pack")) return false;
  if (to == Type::kBF16x2 || to == Type::kF16x2)
    return from == Type::kF32 && decode_pair(d, p, o, to == Type::kBF16x2);
  if (to == Type::kTF32) {
    if (!p.has("rna")) return false;
    operands(d, p, o, Type::kB32, {Type::kF32});
    o.fn = unary<ToTf32, uint32_t, float>;
    return true;
  }
  if (from == Type::kNone) return false;
  int to_bytes = d.register_size(p.operands.at(0)), from_bytes = 0;
  if (p.operands[0].kind == Operand::Kind::kSink) to_bytes = size_of(to);
  o.a[0] = d.dst(p.operands[0], to_bytes);
  o.a[1] = d.any_src(p.operands.at(1), from_bytes, size_of(from));
  if (to_bytes < size_of(to) || from_bytes < size_of(from))
    d.fail("a register of cvt is narrower than its type");
  const bool integral = is_float(to) && is_float(from) &&
                        (p.has("rni") || p.has("rzi") || p.has("rmi") || p.has("rpi"));
  const Round mode = rounding(p, is_float(from) && !is_float(to) ? kZero : kNearest);
  const int flags = (p.has("ftz") ? kFtzFlag : 0) | (p.has("sat") ? kSatFlag : 0) |
                    (p.has("relu") ? kReluFlag : 0) | (integral ? kIntegral : 0);
  o.a[2] = to_bytes;
  o.a[3] = from_bytes;
  o.p[0] = int(to);
  o.p[1] = int(from);
  o.p[2] = mode;
  o.p[3] = flags;
  const bool narrows = size_of(to) < size_of(from) || !is_float(from);
  if (flags == 0 && (mode == kNearest || !narrows || !is_float(to)))
    o.fn = fast_form(to, from, to_bytes, from_bytes);
  if (!o.fn) o.fn = convert;
  return true;
}

struct AddWindow {
  template <class T>
  uint64_t operator()(T a, uint64_t b) const {
    return a + b;
  }
};
struct SubWindow {
  uint64_t operator()(uint64_t a, uint64_t b) const { return a - b; }
};

// cvta.space: space address to generic; cvta.to.space: back. Out of range stays out of range, and
// faults when used.
bool decode_cvta(Decoder& d, const PtxInst& p, Inst& o) {
  o.cls = InstClass::kConvert;
  uint64_t window = p.has("shared") || p.has("shared::cta")   ? kSharedWindow
                    : p.has("local")                          ? kLocalWindow
                    : p.has("param") || p.has("param::entry") ? kParamWindow
                                                              : 0;
  if (size_of(p.type()) != 8) d.fail("cvta of 32-bit addresses");
  o.a[0] = d.dst(p.operands.at(0), 8);
  int bytes = 8;
  o.a[1] = d.any_src(p.operands.at(1), bytes, 8);
  o.a[2] = d.constant(window, 8);
  if (p.has("to"))
    o.fn = binary<SubWindow, uint64_t, uint64_t>;
  else
    o.fn = bytes == 4 ? binary<AddWindow, uint64_t, uint32_t, uint64_t>
                      : binary<AddWindow, uint64_t, uint64_t, uint64_t>;
  return true;
}

struct InWindow {
  static Step run(Warp& w, const Inst& i, uint32_t mask) {
    const uint64_t* a = in<uint64_t>(w, i.a[1]);
    uint32_t r = 0;
    for (int l = 0; l < kWarpSize; ++l) r |= uint32_t((a[l] & kWindowMask) == uint64_t(i.imm)) << l;
    pred_out(w, i.a[0], mask, r);
    return Step::kNext;
  }
};

bool decode_isspacep(Decoder& d, const PtxInst& p, Inst& o) {
  o.cls = InstClass::kCompare;
  o.imm = static_cast<int64_t>(p.has("shared") || p.has("shared::cta") ? kSharedWindow
                               : p.has("local")                        ? kLocalWindow
                               : p.has("param")                        ? kParamWindow
                                                                       : 0);
  o.a[0] = d.dst(p.operands.at(0), Type::kPred);
  o.a[1] = d.src(p.operands.at(1), 8);
  o.fn = InWindow::run;
  return true;
}

}  // namespace

void register_convert(DecodeTable& t) {
  t["cvt"].push_back(decode_cvt);
  t["cvta"].push_back(decode_cvta);
  t["isspacep"].push_back(decode_isspacep);
}

}  // namespace cudasim
