// ld and st in every space.
#include "access.h"
#include "cta.h"

namespace cudasim {

namespace {

// p[0] = bytes of an element, p[1] = bytes of a register, p[2] = vector length | signed << 8, p[3]
// = base bytes.
int element_bytes(const Inst& i) {
  return i.p[0];
}
int vector_length(const Inst& i) {
  return i.p[2] & 0xFF;
}
int access_bytes(const Inst& i) {
  return element_bytes(i) * vector_length(i);
}

template <class E, class R>
void load_as(Warp& w, const Inst& i, uint32_t mask, uint8_t* const* ptr) {
  const int n = vector_length(i);
  for (int v = 0; v < n; ++v) {
    R* d = out<R>(w, i.a[v]);
    for (uint32_t m = mask; m; m &= m - 1) {
      int l = __builtin_ctz(m);
      E e;
      std::memcpy(&e, ptr[l] + v * sizeof(E), sizeof(E));
      d[l] = static_cast<R>(e);
    }
  }
}

template <class U, class S>
void load_element(Warp& w, const Inst& i, uint32_t mask, uint8_t* const* ptr) {
  const bool extend = i.p[2] & 0x100;
  switch (i.p[1]) {
    case 2:
      return extend ? load_as<S, uint16_t>(w, i, mask, ptr) : load_as<U, uint16_t>(w, i, mask, ptr);
    case 4:
      return extend ? load_as<S, uint32_t>(w, i, mask, ptr) : load_as<U, uint32_t>(w, i, mask, ptr);
    default:
      return extend ? load_as<S, uint64_t>(w, i, mask, ptr) : load_as<U, uint64_t>(w, i, mask, ptr);
  }
}

void load_lanes(Warp& w, const Inst& i, uint32_t mask, uint8_t* const* ptr) {
  switch (element_bytes(i)) {
    case 1:
      return load_element<uint8_t, int8_t>(w, i, mask, ptr);
    case 2:
      return load_element<uint16_t, int16_t>(w, i, mask, ptr);
    case 4:
      return load_element<uint32_t, int32_t>(w, i, mask, ptr);
    default:
      return load_element<uint64_t, int64_t>(w, i, mask, ptr);
  }
}

// Lanes whose access was refused read NaN.
void poison(Warp& w, const Inst& i, uint32_t mask) {
  for (int v = 0; v < vector_length(i); ++v)
    for (uint32_t m = mask; m; m &= m - 1)
      std::memset(w.regs + i.a[v] + __builtin_ctz(m) * i.p[1], 0xFF, i.p[1]);
}

// data[lane] = the bytes that the lane stores, gathered from its registers
void gather(Warp& w, const Inst& i, uint32_t mask, uint8_t (*data)[16]) {
  const int bytes = element_bytes(i), reg = i.p[1], n = vector_length(i);
  for (int v = 0; v < n; ++v) {
    const uint8_t* s = in<uint8_t>(w, i.a[v]);
    if (bytes == 4 && reg == 4) {
      for (int l = 0; l < kWarpSize; ++l) std::memcpy(data[l] + 4 * v, s + 4 * l, 4);
    } else {
      for (uint32_t m = mask; m; m &= m - 1) {
        int l = __builtin_ctz(m);
        std::memcpy(data[l] + v * bytes, s + l * reg, bytes);
      }
    }
  }
}

void global_load(Warp& w, const Inst& i, uint32_t mask, const uint64_t* address, bool count) {
  const int bytes = access_bytes(i);
  uint32_t ok = check_global(w, mask, address, bytes, false);
  uint8_t* ptr[kWarpSize] = {};
  for (int l = 0; l < kWarpSize; ++l) ptr[l] = reinterpret_cast<uint8_t*>(address[l]);
  load_lanes(w, i, ok, ptr);
  if (ok != mask) poison(w, i, mask & ~ok);
  if (count) count_global(w, mask, address, bytes);
}

void shared_load(Warp& w, const Inst& i, uint32_t mask, const uint64_t* address) {
  const int bytes = access_bytes(i);
  uint32_t offset[kWarpSize] = {};
  uint32_t ok = check_shared(w, mask, address, bytes, offset);
  count_shared(w, ok, offset, bytes);
  ok &= ~w.cta->shadow.read(w, w.pc, ok, offset, bytes, false);
  uint8_t* ptr[kWarpSize] = {};
  for (int l = 0; l < kWarpSize; ++l) ptr[l] = w.cta->shared + offset[l];
  load_lanes(w, i, ok, ptr);
  if (ok != mask) poison(w, i, mask & ~ok);
}

void local_load(Warp& w, const Inst& i, uint32_t mask, const uint64_t* address) {
  uint32_t offset[kWarpSize] = {};
  uint32_t ok = check_local(w, mask, address, access_bytes(i), offset);
  uint8_t* ptr[kWarpSize] = {};
  const int64_t size = w.cta->program->kernel->local_size;
  for (int l = 0; l < kWarpSize; ++l) ptr[l] = w.local + l * size + offset[l];
  load_lanes(w, i, ok, ptr);
  if (ok != mask) poison(w, i, mask & ~ok);
}

void param_load(Warp& w, const Inst& i, uint32_t mask, const uint64_t* address) {
  uint32_t ok = 0, local = 0;
  uint8_t* ptr[kWarpSize] = {};
  const auto& params = w.cta->launch->params;
  for (uint32_t m = mask; m; m &= m - 1) {
    int l = __builtin_ctz(m);
    uint64_t o = address[l] - kParamBase;
    if (address[l] < kParamBase) {
      local |= 1u << l;
    } else if (o + access_bytes(i) > params.size()) {
      w.cta->report("param_out_of_bounds", w.pc, &w, l, "a read past the kernel's parameters");
    } else {
      ok |= 1u << l;
      ptr[l] = const_cast<uint8_t*>(params.data()) + o;
    }
  }
  load_lanes(w, i, ok, ptr);
  if (local)
    local_load(w, i, local, address);  // a parameter of a call: it lives in the thread's own memory
  if ((ok | local) != mask) poison(w, i, mask & ~(ok | local));
}

template <Space kSpace>
Step load(Warp& w, const Inst& i, uint32_t mask) {
  uint64_t address[kWarpSize];
  lane_addresses(w, i.a[4], i.p[3], i.imm, address);
  if (kSpace == Space::kGlobal) global_load(w, i, mask, address, true);
  if (kSpace == Space::kConst) global_load(w, i, mask, address, false);
  if (kSpace == Space::kShared) shared_load(w, i, mask, address);
  if (kSpace == Space::kLocal) local_load(w, i, mask, address);
  if (kSpace == Space::kParam) param_load(w, i, mask, address);
  if (kSpace == Space::kGeneric) {
    SpaceMasks s = split_generic(mask, address);
    if (s.global) global_load(w, i, s.global, address, true);
    if (s.shared) shared_load(w, i, s.shared, address);
    if (s.local) local_load(w, i, s.local, address);
    if (s.param) param_load(w, i, s.param, address);
  }
  return Step::kNext;
}

void global_store(Warp& w, const Inst& i, uint32_t mask, const uint64_t* address) {
  const int bytes = access_bytes(i);
  uint8_t data[kWarpSize][16];
  gather(w, i, mask, data);
  uint32_t ok = check_global(w, mask, address, bytes, true);
  for (uint32_t m = ok; m; m &= m - 1) {
    int l = __builtin_ctz(m);
    std::memcpy(reinterpret_cast<void*>(address[l]), data[l], bytes);
  }
  count_global(w, mask, address, bytes);
}

void shared_store(Warp& w, const Inst& i, uint32_t mask, const uint64_t* address) {
  const int bytes = access_bytes(i);
  uint8_t data[kWarpSize][16];
  const uint8_t* rows[kWarpSize];
  gather(w, i, mask, data);
  for (int l = 0; l < kWarpSize; ++l) rows[l] = data[l];
  uint32_t offset[kWarpSize] = {};
  uint32_t ok = check_shared(w, mask, address, bytes, offset);
  count_shared(w, ok, offset, bytes);
  w.cta->shadow.write(w, w.pc, ok, offset, bytes, rows);
  for (uint32_t m = ok; m; m &= m - 1) {
    int l = __builtin_ctz(m);
    std::memcpy(w.cta->shared + offset[l], data[l], bytes);
  }
}

void local_store(Warp& w, const Inst& i, uint32_t mask, const uint64_t* address) {
  uint8_t data[kWarpSize][16];
  gather(w, i, mask, data);
  uint32_t offset[kWarpSize] = {};
  const int64_t size = w.cta->program->kernel->local_size;
  for (uint32_t m = check_local(w, mask, address, access_bytes(i), offset); m; m &= m - 1) {
    int l = __builtin_ctz(m);
    std::memcpy(w.local + l * size + offset[l], data[l], access_bytes(i));
  }
}

template <Space kSpace>
Step store(Warp& w, const Inst& i, uint32_t mask) {
  uint64_t address[kWarpSize];
  lane_addresses(w, i.a[4], i.p[3], i.imm, address);
  if (kSpace == Space::kGlobal) global_store(w, i, mask, address);
  if (kSpace == Space::kShared) shared_store(w, i, mask, address);
  if (kSpace == Space::kLocal) local_store(w, i, mask, address);
  if (kSpace == Space::kGeneric) {
    SpaceMasks s = split_generic(mask, address);
    if (s.global) global_store(w, i, s.global, address);
    if (s.shared) shared_store(w, i, s.shared, address);
    if (s.local) local_store(w, i, s.local, address);
    if (s.param)
      w.cta->report("global_read_only", w.pc, &w, __builtin_ctz(s.param),
                    "a write to a kernel parameter");
  }
  return Step::kNext;
}

// ld.param at a fixed place: one value for the warp.
Step load_uniform_param(Warp& w, const Inst& i, uint32_t mask) {
  uint8_t* ptr[kWarpSize] = {};
  for (int l = 0; l < kWarpSize; ++l)
    ptr[l] = const_cast<uint8_t*>(w.cta->launch->params.data()) + i.imm;
  load_lanes(w, i, mask, ptr);
  return Step::kNext;
}

int vector_of(const PtxInst& p) {
  return p.has("v2") ? 2 : p.has("v4") ? 4 : p.has("v8") ? 8 : 1;
}

// The data registers of a load or store in a[0..], and what they look like.
void data_operands(Decoder& d, const PtxInst& p, Inst& o, const Operand& data, bool load) {
  const int n = vector_of(p), bytes = size_of(p.type());
  if (bytes == 0) d.fail("an access of this type");
  if (n * bytes > 16 || n > 4) d.fail("an access of more than 16 bytes");
  const Operand* items = n == 1 && data.kind != Operand::Kind::kVector ? &data : data.items.data();
  int reg = 0;
  for (int v = 0; v < n; ++v) {
    int r = d.register_size(items[v]);
    if (r == 0) r = std::max(bytes, 2);
    if (reg != 0 && r != reg) d.fail("a vector of registers of different widths");
    reg = r;
    o.a[v] = load ? d.dst(items[v], items[v].kind == Operand::Kind::kSink ? 0 : reg)
                  : d.src(items[v], reg);
  }
  if (reg < bytes) d.fail("a register narrower than the access");
  o.p[0] = bytes;
  o.p[1] = reg;
  o.p[2] = n | (is_signed(p.type()) ? 0x100 : 0);
}

bool decode_ld(Decoder& d, const PtxInst& p, Inst& o) {
  data_operands(d, p, o, p.operands.at(0), true);
  o.p[3] = d.address(p.operands.at(1), o, 4);
  switch (parse_space(p)) {
    case Space::kGlobal:
      o.fn = load<Space::kGlobal>;
      o.cls = InstClass::kLoadGlobal;
      break;
    case Space::kShared:
      o.fn = load<Space::kShared>;
      o.cls = InstClass::kLoadShared;
      break;
    case Space::kLocal:
      o.fn = load<Space::kLocal>;
      o.cls = InstClass::kLoadLocal;
      break;
    case Space::kConst:
      o.fn = load<Space::kConst>;
      o.cls = InstClass::kLoadParam;
      break;
    case Space::kParam: {
      o.cls = InstClass::kLoadParam;
      o.fn = load<Space::kParam>;
      const Operand& a = p.operands[1];
      const uint64_t base = a.reg < 0 ? d.symbol_address(a.symbol) : 0;
      if (base >= kParamBase) {
        o.imm = static_cast<int64_t>(base - kParamBase) + a.offset;
        if (o.imm + o.p[0] * vector_length(o) > d.kernel().param_size)
          d.fail("ld.param past the parameters");
        o.fn = load_uniform_param;
      }
      break;
    }
    case Space::kGeneric:
      o.fn = load<Space::kGeneric>;
      o.cls = InstClass::kLoadGeneric;
      break;
  }
  return true;
}

bool decode_st(Decoder& d, const PtxInst& p, Inst& o) {
  data_operands(d, p, o, p.operands.at(1), false);
  o.p[3] = d.address(p.operands.at(0), o, 4);
  switch (parse_space(p)) {
    case Space::kGlobal:
      o.fn = store<Space::kGlobal>;
      o.cls = InstClass::kStoreGlobal;
      break;
    case Space::kShared:
      o.fn = store<Space::kShared>;
      o.cls = InstClass::kStoreShared;
      break;
    case Space::kLocal:
      o.fn = store<Space::kLocal>;
      o.cls = InstClass::kStoreLocal;
      break;
    case Space::kParam:
      o.fn = store<Space::kLocal>;
      o.cls = InstClass::kStoreLocal;
      break;  // of a call
    case Space::kGeneric:
      o.fn = store<Space::kGeneric>;
      o.cls = InstClass::kStoreGeneric;
      break;
    case Space::kConst:
      return false;
  }
  if (parse_space(p) == Space::kShared || parse_space(p) == Space::kGeneric)
    d.note_shared_write(access_bytes(o));
  return true;
}

}  // namespace

void register_memory(DecodeTable& t) {
  t["ld"].push_back(decode_ld);
  t["ldu"].push_back(decode_ld);
  t["st"].push_back(decode_st);
}

}  // namespace cudasim
