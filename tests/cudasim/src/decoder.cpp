#include "decoder.h"

#include <algorithm>
#include <cstring>

#include "cta.h"
#include "memory.h"

namespace cudasim {

namespace {

constexpr int64_t kScratch =
    kSpecialCount * kWarpSize * 4;  // a slot for sinks, behind the special registers
constexpr int64_t kFirst = kScratch + 8 * kWarpSize;

const DecodeTable& table() {
  static const DecodeTable kTable = [] {
    DecodeTable t;
    register_integer(t);
    register_carry(t);
    register_logic(t);
    register_float(t);
    register_math(t);
    register_half(t);
    register_convert(t);
    register_move(t);
    register_compare(t);
    register_memory(t);
    register_atomic(t);
    register_async(t);
    register_matrix(t);
    register_warp(t);
    register_control(t);
    return t;
  }();
  return kTable;
}

Step run_unsupported(Warp& w, const Inst& i, uint32_t) {
  w.cta->report("unsupported_instruction", w.pc, &w, -1, w.cta->program->messages[i.p[0]]);
  return Step::kAbort;
}

Step run_deleted(Warp&, const Inst&, uint32_t) {
  return Step::kNext;
}

}  // namespace

const char* class_name(InstClass c) {
  static const char* kNames[] = {"mma",        "ldmatrix",  "mufu",      "fp32",      "fp64",
                                 "half",       "integer",   "logic",     "move",      "convert",
                                 "compare",    "select",    "ld_global", "st_global", "ld_shared",
                                 "st_shared",  "ld_local",  "st_local",  "ld_param",  "ld_generic",
                                 "st_generic", "cp_async",  "atomic",    "shuffle",   "vote",
                                 "barrier",    "warp_sync", "branch",    "other"};
  return kNames[static_cast<int>(c)];
}

Decoder::Decoder(Program& program)
    : program_(program), map_(allocate_registers(*program.kernel, kFirst)) {}

int32_t Decoder::constant(uint64_t bits, int size) {
  if (size < 8) bits &= (1ull << (8 * size)) - 1;
  auto [it, added] = constants_.try_emplace({bits, size}, 0);
  if (added) {
    auto& pool = *program_.consts_storage;
    size_t at = (pool.size() + 63) / 64 * 64;
    pool.resize(at + 8 * kWarpSize);
    for (int l = 0; l < kWarpSize; ++l) std::memcpy(pool.data() + at + l * size, &bits, size);
    it->second = static_cast<int32_t>(at) | kConstBit;
  }
  return it->second;
}

int Decoder::register_size(const Operand& o) const {
  if (o.kind == Operand::Kind::kReg) return size_of(kernel().registers[o.reg].type);
  return o.kind == Operand::Kind::kSpecial ? 4 : 0;
}

int32_t Decoder::src(const Operand& o, int size) {
  switch (o.kind) {
    case Operand::Kind::kReg:
      if (register_size(o) != size)
        fail("register " + kernel().registers[o.reg].name +
             " has the wrong width for this instruction");
      return map_.offset[o.reg];
    case Operand::Kind::kSpecial:
      if (o.reg >= kSpecialCount) fail("special register " + o.symbol + " is read by mov only");
      if (size == 4) return o.reg * kWarpSize * 4;
      fail("special register " + o.symbol + " has 32 bits");
    case Operand::Kind::kF64: {
      if (size == 8) return constant(o.imm, 8);
      double d;
      std::memcpy(&d, &o.imm, 8);
      float f = static_cast<float>(d);
      uint32_t bits;
      std::memcpy(&bits, &f, 4);
      return constant(bits, size);
    }
    case Operand::Kind::kInt:
    case Operand::Kind::kF32:
      return constant(o.imm, size);
    case Operand::Kind::kSymbol:
      return constant(symbol_address(o.symbol) + o.offset, size);
    default:
      fail("this kind of operand is not supported here");
  }
}

int32_t Decoder::any_src(const Operand& o, int& size, int wanted) {
  size = register_size(o);
  if (size == 0) size = wanted;
  return src(o, size);
}

int32_t Decoder::dst(const Operand& o, int size) {
  if (o.kind == Operand::Kind::kSink) return static_cast<int32_t>(kScratch);
  if (o.kind != Operand::Kind::kReg) fail("the destination is not a register");
  if (size != 0 && register_size(o) != size)
    fail("register " + kernel().registers[o.reg].name +
         " has the wrong width for this instruction");
  return map_.offset[o.reg];
}

int32_t Decoder::pred(const Operand& o) {
  if (o.kind == Operand::Kind::kInt) return constant(o.imm ? kFullMask : 0, 4);
  if (o.kind != Operand::Kind::kReg || kernel().registers[o.reg].type != Type::kPred)
    fail("a predicate is expected");
  return map_.offset[o.reg];
}

int32_t Decoder::second(const Operand& o) const {
  return o.second >= 0 ? map_.offset[o.second] : static_cast<int32_t>(kScratch);
}

uint64_t Decoder::symbol_address(const std::string& name) const {
  for (const auto& v : kernel().shared)
    if (v.name == name) return kSharedBase + v.offset;
  if (auto it = kernel().locals.find(name); it != kernel().locals.end())
    return kLocalBase + it->second;
  for (const auto& p : kernel().params)
    if (p.name == name) return kParamBase + p.offset;
  if (GlobalVariable* g = program_.module->global(name))
    return reinterpret_cast<uint64_t>(g->address);
  fail("unknown symbol " + name);
}

int Decoder::address(const Operand& o, Inst& out, int slot) {
  if (o.kind != Operand::Kind::kAddress) fail("an address in brackets is expected");
  out.imm = o.offset;
  if (o.reg < 0) {
    uint64_t base = o.symbol.empty() ? 0 : symbol_address(o.symbol);
    out.a[slot] = constant(base, 8);
    return 8;
  }
  out.a[slot] = map_.offset[o.reg];
  return size_of(kernel().registers[o.reg].type);
}

int Decoder::add_branch_table(const std::vector<int>& targets) {
  program_.branch_tables.push_back(targets);
  return static_cast<int>(program_.branch_tables.size()) - 1;
}

void Decoder::note_shared_write(int bytes) {
  const int shift = bytes == 2 ? 1 : 2;  // bytes split their granule, one by one
  program_.granule_shift = std::min(program_.granule_shift, shift);
}

void Decoder::decode_one(const PtxInst& inst, Inst& out) {
  out.guard = inst.guard >= 0 ? map_.offset[inst.guard] : -1;
  out.guard_negated = inst.guard_negated;
  auto it = table().find(inst.op);
  try {
    if (it == table().end()) fail("unknown opcode " + inst.op);
    for (DecodeFn decode : it->second)
      if (decode(*this, inst, out)) break;
    if (!out.fn) fail("this form of " + inst.op + " is not supported");
  } catch (const PtxError& e) {  // reported if it is executed
    out.fn = run_unsupported;
    out.p[0] = static_cast<int32_t>(program_.messages.size());
    program_.messages.push_back(e.what());
  }
}

void Decoder::decode_all() {
  const auto& code = kernel().code;
  program_.code.resize(code.size());
  for (size_t i = 0; i < code.size(); ++i) decode_one(code[i], program_.code[i]);
  auto& pool = *program_.consts_storage;  // moved to a 64-byte boundary
  size_t bytes = pool.size();
  pool.resize(bytes + 64);
  size_t shift = (64 - reinterpret_cast<uintptr_t>(pool.data()) % 64) % 64;
  std::memmove(pool.data() + shift, pool.data(), bytes);
  program_.consts = pool.data() + shift;
  program_.file_bytes = map_.bytes;
}

std::shared_ptr<Program> build_program(std::shared_ptr<PtxModule> module,
                                       const std::string& entry) {
  auto program = std::make_shared<Program>();
  program->module = module;
  program->kernel = module->parse_entry(entry);
  Decoder(*program).decode_all();
  return program;
}

std::shared_ptr<Program> delete_instruction(const Program& program, int index) {
  auto mutant = std::make_shared<Program>(program);
  mutant->code.at(index).fn = run_deleted;
  return mutant;
}

}  // namespace cudasim
