// atom and red. Global atomics are atomic on the host too: blocks run on several host threads.
#include <algorithm>
#include <cmath>

#include "access.h"
#include "cta.h"
#include "half.h"

namespace cudasim {

namespace {

enum Op : int { kAdd, kMin, kMax, kAnd, kOr, kXor, kExch, kInc, kDec, kCas };

// p[0] = operation, p[1] = Type, p[2] = has a result, p[3] = base bytes; a[1] = address, a[2] =
// operand, a[3] = cas value.
template <class T>
T integer_op(int op, T old, T x, T y) {
  switch (op) {
    case kAdd:
      return T(std::make_unsigned_t<T>(old) + std::make_unsigned_t<T>(x));
    case kMin:
      return std::min(old, x);
    case kMax:
      return std::max(old, x);
    case kAnd:
      return old & x;
    case kOr:
      return old | x;
    case kXor:
      return old ^ x;
    case kExch:
      return x;
    case kInc:
      return old >= x ? T(0) : T(old + 1);
    case kDec:
      return old == 0 || old > x ? x : T(old - 1);
    default:
      return old == x ? y : old;
  }
}

template <class F>
F float_op(int op, F old, F x) {
  return op == kAdd ? old + x : op == kMin ? std::fmin(old, x) : op == kMax ? std::fmax(old, x) : x;
}

template <class H>
uint16_t half_op(int op, uint16_t old, uint16_t x) {
  return H::down(float_op(op, H::up(old), H::up(x)));
}

template <class H>
uint32_t pair_op(int op, uint32_t old, uint32_t x) {
  return uint32_t(half_op<H>(op, uint16_t(old), uint16_t(x))) |
         uint32_t(half_op<H>(op, uint16_t(old >> 16), uint16_t(x >> 16))) << 16;
}

// The new bits of the cell.
uint64_t apply(int op, Type t, uint64_t old, uint64_t x, uint64_t y) {
  switch (t) {
    case Type::kF32:
      return float_bits(float_op(op, bits_float(uint32_t(old)), bits_float(uint32_t(x))));
    case Type::kF64:
      return bit_cast<uint64_t>(float_op(op, bit_cast<double>(old), bit_cast<double>(x)));
    case Type::kF16:
      return half_op<F16>(op, uint16_t(old), uint16_t(x));
    case Type::kBF16:
      return half_op<BF16>(op, uint16_t(old), uint16_t(x));
    case Type::kF16x2:
      return pair_op<F16>(op, uint32_t(old), uint32_t(x));
    case Type::kBF16x2:
      return pair_op<BF16>(op, uint32_t(old), uint32_t(x));
    case Type::kS32:
      return uint32_t(integer_op<int32_t>(op, int32_t(old), int32_t(x), int32_t(y)));
    case Type::kS64:
      return uint64_t(integer_op<int64_t>(op, int64_t(old), int64_t(x), int64_t(y)));
    case Type::kB64:
    case Type::kU64:
      return integer_op<uint64_t>(op, old, x, y);
    case Type::kB16:
      return integer_op<uint16_t>(op, uint16_t(old), uint16_t(x), uint16_t(y));
    default:
      return integer_op<uint32_t>(op, uint32_t(old), uint32_t(x), uint32_t(y));
  }
}

template <class T>
uint64_t exchange(uint8_t* cell, int op, Type t, uint64_t x, uint64_t y) {
  T* p = reinterpret_cast<T*>(cell);
  T old = __atomic_load_n(p, __ATOMIC_SEQ_CST);
  while (!__atomic_compare_exchange_n(p, &old, T(apply(op, t, old, x, y)), false, __ATOMIC_SEQ_CST,
                                      __ATOMIC_SEQ_CST)) {
  }
  return old;
}

uint64_t read_bits(const Warp& w, int32_t offset, int lane, int bytes) {
  return bytes == 8   ? in<uint64_t>(w, offset)[lane]
         : bytes == 4 ? in<uint32_t>(w, offset)[lane]
                      : in<uint16_t>(w, offset)[lane];
}

void run_lanes(Warp& w, const Inst& i, uint32_t mask, uint8_t* const* ptr) {
  const Type t = Type(i.p[1]);
  const int bytes = size_of(t);
  for (uint32_t m = mask; m; m &= m - 1) {
    int l = __builtin_ctz(m);
    uint64_t x = read_bits(w, i.a[2], l, bytes),
             y = i.p[0] == kCas ? read_bits(w, i.a[3], l, bytes) : 0;
    uint64_t old = bytes == 8   ? exchange<uint64_t>(ptr[l], i.p[0], t, x, y)
                   : bytes == 4 ? exchange<uint32_t>(ptr[l], i.p[0], t, x, y)
                                : exchange<uint16_t>(ptr[l], i.p[0], t, x, y);
    if (i.p[2]) std::memcpy(w.regs + i.a[0] + l * bytes, &old, bytes);
  }
}

Step atomic(Warp& w, const Inst& i, uint32_t mask) {
  const int bytes = size_of(Type(i.p[1]));
  uint64_t address[kWarpSize];
  uint32_t offset[kWarpSize];
  uint8_t* ptr[kWarpSize];
  lane_addresses(w, i.a[1], i.p[3], i.imm, address);
  SpaceMasks s;
  if (i.flags == uint8_t(Space::kGlobal))
    s.global = mask;
  else if (i.flags == uint8_t(Space::kShared))
    s.shared = mask;
  else
    s = split_generic(mask, address);
  uint32_t done = 0;
  if (s.global) {
    uint32_t ok = check_global(w, s.global, address, bytes, true);
    for (int l = 0; l < kWarpSize; ++l) ptr[l] = reinterpret_cast<uint8_t*>(address[l]);
    run_lanes(w, i, ok, ptr);
    count_global(w, s.global, address, bytes);
    done |= ok;
  }
  if (s.shared) {
    uint32_t ok = check_shared(w, s.shared, address, bytes, offset);
    w.cta->shadow.atomic(w, w.pc, ok, offset, bytes);
    for (int l = 0; l < kWarpSize; ++l) ptr[l] = w.cta->shared + offset[l];
    run_lanes(w, i, ok, ptr);
    done |= ok;
  }
  if (s.local | s.param)
    w.cta->report("wrong_address_space", w.pc, &w, __builtin_ctz(s.local | s.param),
                  "an atomic on local memory or parameters");
  if (i.p[2])
    for (uint32_t m = mask & ~done; m; m &= m - 1)
      std::memset(w.regs + i.a[0] + __builtin_ctz(m) * bytes, 0xFF, bytes);
  return Step::kNext;
}

bool decode(Decoder& d, const PtxInst& p, Inst& o) {
  static const std::unordered_map<std::string, int> kOps = {
      {"add", kAdd}, {"min", kMin},   {"max", kMax}, {"and", kAnd}, {"or", kOr},
      {"xor", kXor}, {"exch", kExch}, {"inc", kInc}, {"dec", kDec}, {"cas", kCas}};
  int op = -1;
  for (const auto& m : p.mods)
    if (auto it = kOps.find(m); it != kOps.end()) op = it->second;
  const Type t = p.type();
  if (op < 0 || size_of(t) < 2 || p.has("v2") || p.has("v4")) return false;
  if (is_float(t) && op > kMax && op != kExch) return false;
  const size_t first = p.op == "atom" ? 1 : 0;
  o.cls = InstClass::kAtomic;
  o.p[0] = op;
  o.p[1] = int(t);
  o.p[2] = p.op == "atom";
  if (o.p[2]) o.a[0] = d.dst(p.operands.at(0), size_of(t));
  o.p[3] = d.address(p.operands.at(first), o, 1);
  o.a[2] = d.src(p.operands.at(first + 1), size_of(t));
  if (op == kCas) o.a[3] = d.src(p.operands.at(first + 2), size_of(t));
  Space space = parse_space(p);
  o.flags = uint8_t(space);
  if (space != Space::kGlobal) d.note_shared_write(size_of(t));
  o.fn = atomic;
  return true;
}

}  // namespace

void register_atomic(DecodeTable& t) {
  t["atom"].push_back(decode);
  t["red"].push_back(decode);
}

}  // namespace cudasim
