// ldmatrix, movmatrix and mma.sync. Products of 16-bit and tf32 values are exact in float, so
// contraction is harmless here. The order of the sums and their roundings differ from a tensor
// core's.
#include "access.h"
#include "cta.h"
#include "half.h"

namespace cudasim {

namespace {

// .aligned instructions need the whole warp.
bool whole_warp(Warp& w, uint32_t mask, Step& step) {
  if (mask == kFullMask) return true;
  if (mask == w.live || mask != w.active) {
    w.cta->report("warp_divergence", w.pc, &w, __builtin_ctz(~mask),
                  "a matrix instruction without all lanes of the warp");
    step = Step::kAbort;
  } else {
    step = Step::kWaitLanes;
  }
  return false;
}

// a[0..3] = destinations, a[4] = address; p[0] = matrices, p[1] = transposed, p[3] = base bytes.
Step ldmatrix(Warp& w, const Inst& i, uint32_t mask) {
  Step step = Step::kNext;
  if (!whole_warp(w, mask, step)) return step;
  const int n = i.p[0];
  const uint32_t rows =
      n == 4 ? kFullMask : (1u << (8 * n)) - 1;  // the lanes that give row addresses
  uint64_t address[kWarpSize];
  uint32_t offset[kWarpSize];
  lane_addresses(w, i.a[4], i.p[3], i.imm, address);
  if (i.flags) split_generic(rows, address);
  uint32_t ok = check_shared(w, rows, address, 16, offset);
  count_shared(w, ok, offset, 16);
  ok &= ~w.cta->shadow.read(w, w.pc, ok, offset, 16, true);
  for (int j = 0; j < n; ++j) {
    alignas(64) uint16_t m[8][8];
    for (int r = 0; r < 8; ++r) {
      const int lane = 8 * j + r;
      if (ok >> lane & 1)
        std::memcpy(m[r], w.cta->shared + offset[lane], 16);
      else
        std::memset(m[r], 0xFF, 16);
    }
    uint32_t* d = out<uint32_t>(w, i.a[j]);
    if (!i.p[1]) {
      std::memcpy(d, m, 128);  // lane 4r + c holds word c of row r
    } else {
      for (int l = 0; l < kWarpSize; ++l) {
        const int row = 2 * (l % 4), column = l / 4;
        d[l] = uint32_t(m[row][column]) | uint32_t(m[row + 1][column]) << 16;
      }
    }
  }
  return Step::kNext;
}

bool decode_ldmatrix(Decoder& d, const PtxInst& p, Inst& o) {
  if (!p.has("m8n8") || !p.has("b16")) return false;
  o.cls = InstClass::kLdmatrix;
  o.p[0] = p.has("x4") ? 4 : p.has("x2") ? 2 : 1;
  o.p[1] = p.has("trans");
  const Operand& to = p.operands.at(0);
  for (int j = 0; j < o.p[0]; ++j)
    o.a[j] = d.dst(to.kind == Operand::Kind::kVector ? to.items.at(j) : to, 4);
  o.p[3] = d.address(p.operands.at(1), o, 4);
  o.flags = parse_space(p) == Space::kGeneric;
  o.fn = ldmatrix;
  return true;
}

Step movmatrix(Warp& w, const Inst& i, uint32_t mask) {
  Step step = Step::kNext;
  if (!whole_warp(w, mask, step)) return step;
  uint16_t m[8][8];
  std::memcpy(m, in<uint32_t>(w, i.a[1]), 128);
  uint32_t* d = out<uint32_t>(w, i.a[0]);
  for (int l = 0; l < kWarpSize; ++l) {
    const int row = l / 4, column = 2 * (l % 4);
    d[l] = uint32_t(m[column][row]) | uint32_t(m[column + 1][row]) << 16;
  }
  return Step::kNext;
}

bool decode_movmatrix(Decoder& d, const PtxInst& p, Inst& o) {
  o.cls = InstClass::kShuffle;
  operands(d, p, o, Type::kB32, {Type::kB32});
  o.fn = movmatrix;
  return true;
}

using Row = float __attribute__((vector_size(32)));  // the 8 columns of an accumulator row

// Fragments of 8x8 blocks: the lane order of one register is exactly the row-major order of its
// block.
template <class H, int K>
struct HalfOperands {
  static constexpr int kDepth = K, kA = K / 4, kB = K / 8;  // registers of A and of B
  static void load_a(const Warp& w, const Inst& i, float (*a)[K]) {
    for (int block = 0; block < kA; ++block) {
      const uint16_t* s = in<uint16_t>(w, i.a[4 + block]);
      const int row = block % 2 * 8, column = block / 2 * 8;
      for (int r = 0; r < 8; ++r)
        for (int c = 0; c < 8; ++c) a[row + r][column + c] = H::up(s[8 * r + c]);
    }
  }
  static void load_b(const Warp& w, const Inst& i, float (*b)[8]) {
    for (int block = 0; block < kB; ++block) {
      const uint16_t* s = in<uint16_t>(w, i.a[8 + block]);
      for (int n = 0; n < 8; ++n)
        for (int k = 0; k < 8; ++k) b[8 * block + k][n] = H::up(s[8 * n + k]);
    }
  }
};

template <int K>
struct Tf32Operands {
  static constexpr int kDepth = K, kA = K / 2, kB = K / 4;
  static float value(uint32_t bits) {
    return bits_float(bits & 0xFFFFE000u);
  }  // the low bits are ignored
  static void load_a(const Warp& w, const Inst& i, float (*a)[K]) {
    for (int block = 0; block < kA; ++block)
      for (int l = 0; l < kWarpSize; ++l)
        a[block % 2 * 8 + l / 4][block / 2 * 4 + l % 4] = value(in<uint32_t>(w, i.a[4 + block])[l]);
  }
  static void load_b(const Warp& w, const Inst& i, float (*b)[8]) {
    for (int block = 0; block < kB; ++block)
      for (int l = 0; l < kWarpSize; ++l)
        b[block * 4 + l % 4][l / 4] = value(in<uint32_t>(w, i.a[8 + block])[l]);
  }
};

struct F32Accumulator {
  static void load(const Warp& w, const Inst& i, float (*c)[8]) {
    for (int half = 0; half < 2; ++half) {
      const float *even = in<float>(w, i.a[12 + 2 * half]), *odd = in<float>(w, i.a[13 + 2 * half]);
      for (int l = 0; l < kWarpSize; ++l) {
        c[8 * half + l / 4][2 * (l % 4)] = even[l];
        c[8 * half + l / 4][2 * (l % 4) + 1] = odd[l];
      }
    }
  }
  static void store(Warp& w, const Inst& i, const float (*c)[8]) {
    for (int half = 0; half < 2; ++half) {
      float *even = out<float>(w, i.a[2 * half]), *odd = out<float>(w, i.a[2 * half + 1]);
      for (int l = 0; l < kWarpSize; ++l) {
        even[l] = c[8 * half + l / 4][2 * (l % 4)];
        odd[l] = c[8 * half + l / 4][2 * (l % 4) + 1];
      }
    }
  }
};

struct F16Accumulator {
  static void load(const Warp& w, const Inst& i, float (*c)[8]) {
    for (int half = 0; half < 2; ++half)
      for (int k = 0; k < 64; ++k)
        c[8 * half + k / 8][k % 8] = f16_to_f32(in<uint16_t>(w, i.a[12 + half])[k]);
  }
  static void store(Warp& w, const Inst& i, const float (*c)[8]) {
    for (int half = 0; half < 2; ++half)
      for (int k = 0; k < 64; ++k)
        out<uint16_t>(w, i.a[half])[k] = f32_to_f16(c[8 * half + k / 8][k % 8]);
  }
};

template <class Operands, class Accumulator>
Step mma(Warp& w, const Inst& i, uint32_t mask) {
  Step step = Step::kNext;
  if (!whole_warp(w, mask, step)) return step;
  constexpr int K = Operands::kDepth;
  alignas(64) float a[16][K], b[K][8], c[16][8];
  Operands::load_a(w, i, a);
  Operands::load_b(w, i, b);
  Accumulator::load(w, i, c);
  Row columns[K];
  std::memcpy(columns, b, sizeof columns);
  for (int m = 0; m < 16; m += 4) {  // four rows at a time keep the multiplier's pipeline full
    Row r[4];
    std::memcpy(r, c[m], sizeof r);
    for (int k = 0; k < K; ++k)
      for (int j = 0; j < 4; ++j) r[j] += a[m + j][k] * columns[k];
    std::memcpy(c[m], r, sizeof r);
  }
  Accumulator::store(w, i, c);
  return Step::kNext;
}

// int8: p[0] = A signed, p[1] = B signed, p[2] = saturate, p[3] = K.
Step mma_int8(Warp& w, const Inst& i, uint32_t mask) {
  Step step = Step::kNext;
  if (!whole_warp(w, mask, step)) return step;
  const int depth = i.p[3];
  int32_t a[16][32], b[32][8], d[4][kWarpSize];
  auto byte = [](uint32_t word, int k, bool is_signed_type) {
    uint8_t x = uint8_t(word >> (8 * k));
    return is_signed_type ? int32_t(int8_t(x)) : int32_t(x);
  };
  for (int block = 0; block < depth / 8; ++block)
    for (int l = 0; l < kWarpSize; ++l)
      for (int k = 0; k < 4; ++k)
        a[block % 2 * 8 + l / 4][block / 2 * 16 + l % 4 * 4 + k] =
            byte(in<uint32_t>(w, i.a[4 + block])[l], k, i.p[0]);
  for (int block = 0; block < depth / 16; ++block)
    for (int l = 0; l < kWarpSize; ++l)
      for (int k = 0; k < 4; ++k)
        b[block * 16 + l % 4 * 4 + k][l / 4] = byte(in<uint32_t>(w, i.a[8 + block])[l], k, i.p[1]);
  for (int r = 0; r < 4; ++r)
    for (int l = 0; l < kWarpSize; ++l) {
      const int row = l / 4 + r / 2 * 8, column = l % 4 * 2 + r % 2;
      int64_t sum = in<int32_t>(w, i.a[12 + r])[l];
      for (int k = 0; k < depth; ++k) sum += int64_t(a[row][k]) * b[k][column];
      if (i.p[2]) sum = sum > INT32_MAX ? INT32_MAX : sum < INT32_MIN ? INT32_MIN : sum;
      d[r][l] = static_cast<int32_t>(sum);
    }
  for (int r = 0; r < 4; ++r) std::memcpy(out<int32_t>(w, i.a[r]), d[r], sizeof d[r]);
  return Step::kNext;
}

void fragment(Decoder& d, const Operand& o, Inst& out_inst, int first, int count,
              bool destination) {
  const bool vector = o.kind == Operand::Kind::kVector;
  if ((vector ? static_cast<int>(o.items.size()) : 1) != count)
    d.fail("a matrix fragment of an unexpected number of registers");
  for (int k = 0; k < count; ++k) {
    const Operand& r = vector ? o.items[k] : o;
    out_inst.a[first + k] = destination ? d.dst(r, 4) : d.src(r, 4);
  }
}

template <class Operands>
bool decode_as(Decoder& d, const PtxInst& p, Inst& o, Type to) {
  const bool f32 = to == Type::kF32;
  if (!f32 && to != Type::kF16) return false;
  fragment(d, p.operands.at(0), o, 0, f32 ? 4 : 2, true);
  fragment(d, p.operands.at(1), o, 4, Operands::kA, false);
  fragment(d, p.operands.at(2), o, 8, Operands::kB, false);
  fragment(d, p.operands.at(3), o, 12, f32 ? 4 : 2, false);
  o.fn = f32 ? mma<Operands, F32Accumulator> : mma<Operands, F16Accumulator>;
  return true;
}

bool decode_mma(Decoder& d, const PtxInst& p, Inst& o) {
  o.cls = InstClass::kMma;
  if (p.has("sp") || p.types.size() != 4) return false;
  const Type to = p.type(0), a = p.type(1), b = p.type(2);
  const bool k16 = p.has("m16n8k16"), k8 = p.has("m16n8k8"), k4 = p.has("m16n8k4"),
             k32 = p.has("m16n8k32");
  if (a == Type::kF16 && b == a && k16) return decode_as<HalfOperands<F16, 16>>(d, p, o, to);
  if (a == Type::kF16 && b == a && k8) return decode_as<HalfOperands<F16, 8>>(d, p, o, to);
  if (a == Type::kBF16 && b == a && k16 && to == Type::kF32)
    return decode_as<HalfOperands<BF16, 16>>(d, p, o, to);
  if (a == Type::kBF16 && b == a && k8 && to == Type::kF32)
    return decode_as<HalfOperands<BF16, 8>>(d, p, o, to);
  if (a == Type::kTF32 && b == a && k8 && to == Type::kF32)
    return decode_as<Tf32Operands<8>>(d, p, o, to);
  if (a == Type::kTF32 && b == a && k4 && to == Type::kF32)
    return decode_as<Tf32Operands<4>>(d, p, o, to);
  if (size_of(a) == 1 && size_of(b) == 1 && to == Type::kS32 && (k16 || k32)) {
    o.p[3] = k32 ? 32 : 16;
    o.p[0] = is_signed(a);
    o.p[1] = is_signed(b);
    o.p[2] = p.has("satfinite");
    fragment(d, p.operands.at(0), o, 0, 4, true);
    fragment(d, p.operands.at(1), o, 4, o.p[3] / 8, false);
    fragment(d, p.operands.at(2), o, 8, o.p[3] / 16, false);
    fragment(d, p.operands.at(3), o, 12, 4, false);
    o.fn = mma_int8;
    return true;
  }
  return false;
}

}  // namespace

void register_matrix(DecodeTable& t) {
  t["ldmatrix"].push_back(decode_ldmatrix);
  t["movmatrix"].push_back(decode_movmatrix);
  t["mma"].push_back(decode_mma);
}

}  // namespace cudasim
