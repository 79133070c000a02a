// setp and set.
#include <cmath>

#include "exec.h"
#include "half.h"

namespace cudasim {

namespace {

struct Eq {
  template <class T>
  bool operator()(T a, T b) const {
    return a == b;
  }
};
struct Ne {
  template <class T>
  bool operator()(T a, T b) const {
    return a < b || a > b;
  }
};  // ordered
struct Lt {
  template <class T>
  bool operator()(T a, T b) const {
    return a < b;
  }
};
struct Le {
  template <class T>
  bool operator()(T a, T b) const {
    return a <= b;
  }
};
struct Gt {
  template <class T>
  bool operator()(T a, T b) const {
    return a > b;
  }
};
struct Ge {
  template <class T>
  bool operator()(T a, T b) const {
    return a >= b;
  }
};
struct Equ {
  template <class T>
  bool operator()(T a, T b) const {
    return !(a < b || a > b);
  }
};
struct Neu {
  template <class T>
  bool operator()(T a, T b) const {
    return a != b;
  }
};
struct Ltu {
  template <class T>
  bool operator()(T a, T b) const {
    return !(a >= b);
  }
};
struct Leu {
  template <class T>
  bool operator()(T a, T b) const {
    return !(a > b);
  }
};
struct Gtu {
  template <class T>
  bool operator()(T a, T b) const {
    return !(a <= b);
  }
};
struct Geu {
  template <class T>
  bool operator()(T a, T b) const {
    return !(a < b);
  }
};
struct Num {
  template <class T>
  bool operator()(T a, T b) const {
    return a == a && b == b;
  }
};
struct Nan {
  template <class T>
  bool operator()(T a, T b) const {
    return a != a || b != b;
  }
};

// The register's type and how to read it as something that compares.
template <class T>
struct Plain {
  using Register = T;
  template <bool kFtz>
  static T get(T x) {
    if constexpr (std::is_same_v<T, float>)
      return kFtz ? flush(x) : x;
    else
      return x;
  }
};
template <class H>
struct Half {
  using Register = uint16_t;
  template <bool>
  static float get(uint16_t x) {
    return H::up(x);
  }
};

uint32_t pack_bytes(const uint8_t* t) {
  uint32_t r = 0;
  for (int k = 0; k < 4; ++k) {
    uint64_t x;
    std::memcpy(&x, t + 8 * k, 8);
    r |= uint32_t(x * 0x0102040810204080ull >> 56)
         << (8 * k);  // bit 0 of each byte to its place in the top byte
  }
  return r;
}

template <class F, class V, bool kFtz>
Step compare(Warp& w, const Inst& i, uint32_t mask) {
  const auto *a = in<typename V::Register>(w, i.a[2]), *b = in<typename V::Register>(w, i.a[3]);
  uint8_t t[kWarpSize];
  for (int l = 0; l < kWarpSize; ++l)
    t[l] = F()(V::template get<kFtz>(a[l]), V::template get<kFtz>(b[l]));
  uint32_t r = pack_bytes(t), q = ~r;
  if (i.p[0]) {
    uint32_t c = pred_in(w, i.a[4], i.negate[0]);
    r = i.p[0] == 1 ? r & c : i.p[0] == 2 ? r | c : r ^ c;
    q = i.p[0] == 1 ? q & c : i.p[0] == 2 ? q | c : q ^ c;
  }
  if (i.p[1]) {  // set: all ones or 1.0 in a register
    uint32_t* d = out<uint32_t>(w, i.a[0]);
    for (int l = 0; l < kWarpSize; ++l)
      if (mask >> l & 1) d[l] = r >> l & 1 ? uint32_t(i.imm) : 0;
    return Step::kNext;
  }
  pred_out(w, i.a[0], mask, r);
  pred_out(w, i.a[1], mask, q);
  return Step::kNext;
}

template <class F>
Handler pick_int(Type t) {
  switch (t) {
    case Type::kB16:
    case Type::kU16:
      return compare<F, Plain<uint16_t>, false>;
    case Type::kS16:
      return compare<F, Plain<int16_t>, false>;
    case Type::kB32:
    case Type::kU32:
      return compare<F, Plain<uint32_t>, false>;
    case Type::kS32:
      return compare<F, Plain<int32_t>, false>;
    case Type::kB64:
    case Type::kU64:
      return compare<F, Plain<uint64_t>, false>;
    case Type::kS64:
      return compare<F, Plain<int64_t>, false>;
    default:
      return nullptr;
  }
}

template <class F>
Handler pick_float(Type t, bool ftz) {
  switch (t) {
    case Type::kF32:
      return ftz ? compare<F, Plain<float>, true> : compare<F, Plain<float>, false>;
    case Type::kF64:
      return compare<F, Plain<double>, false>;
    case Type::kF16:
      return compare<F, Half<F16>, false>;
    case Type::kBF16:
      return compare<F, Half<BF16>, false>;
    default:
      return nullptr;
  }
}

template <class F>
Handler pick(Type t, bool ftz) {
  return is_float(t) ? pick_float<F>(t, ftz) : pick_int<F>(t);
}

Handler pick_compare(Decoder& d, const std::string& op, Type t, bool ftz) {
  const bool real = is_float(t), is_signed_type = is_signed(t);
  if (op == "eq") return pick<Eq>(t, ftz);
  if (op == "ne") return pick<Ne>(t, ftz);
  if (op == "lt" || op == "lo") return pick<Lt>(t, ftz);
  if (op == "le" || op == "ls") return pick<Le>(t, ftz);
  if (op == "gt" || op == "hi") return pick<Gt>(t, ftz);
  if (op == "ge" || op == "hs") return pick<Ge>(t, ftz);
  if (!real) d.fail("comparison " + op + (is_signed_type ? " of signed integers" : " of integers"));
  if (op == "equ") return pick_float<Equ>(t, ftz);
  if (op == "neu") return pick_float<Neu>(t, ftz);
  if (op == "ltu") return pick_float<Ltu>(t, ftz);
  if (op == "leu") return pick_float<Leu>(t, ftz);
  if (op == "gtu") return pick_float<Gtu>(t, ftz);
  if (op == "geu") return pick_float<Geu>(t, ftz);
  if (op == "num") return pick_float<Num>(t, ftz);
  if (op == "nan") return pick_float<Nan>(t, ftz);
  d.fail("comparison " + op);
}

void bool_operand(Decoder& d, const PtxInst& p, Inst& o) {
  o.p[0] = p.has("and") ? 1 : p.has("or") ? 2 : p.has("xor") ? 3 : 0;
  if (!o.p[0]) return;
  o.a[4] = d.pred(p.operands.at(3));
  o.negate[0] = p.operands[3].negated;
}

bool decode_setp(Decoder& d, const PtxInst& p, Inst& o) {
  Type t = p.type();
  o.cls = InstClass::kCompare;
  o.a[0] = d.dst(p.operands.at(0), Type::kPred);
  o.a[1] = d.second(p.operands[0]);
  o.a[2] = d.src(p.operands.at(1), t);
  o.a[3] = d.src(p.operands.at(2), t);
  bool_operand(d, p, o);
  o.fn = pick_compare(d, p.mods.at(0), t, p.has("ftz"));
  return true;
}

bool decode_set(Decoder& d, const PtxInst& p, Inst& o) {
  Type to = p.type(0), t = p.type(1);
  if (size_of(to) != 4 || is_float(to) != (to == Type::kF32)) return false;
  o.cls = InstClass::kCompare;
  o.a[0] = d.dst(p.operands.at(0), to);
  o.a[2] = d.src(p.operands.at(1), t);
  o.a[3] = d.src(p.operands.at(2), t);
  bool_operand(d, p, o);
  o.p[1] = 1;
  o.imm = to == Type::kF32 ? 0x3F800000 : 0xFFFFFFFF;
  o.fn = pick_compare(d, p.mods.at(0), t, p.has("ftz"));
  return true;
}

}  // namespace

void register_compare(DecodeTable& t) {
  t["setp"].push_back(decode_setp);
  t["set"].push_back(decode_set);
}

}  // namespace cudasim
