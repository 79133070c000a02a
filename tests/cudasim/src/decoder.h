// Turns parsed instructions into handlers. Each exec_*.cpp file registers the opcodes that it
// knows.
#pragma once

#include <functional>
#include <map>
#include <string>
#include <unordered_map>

#include "inst.h"
#include "liveness.h"
#include "ptx.h"

namespace cudasim {

class Decoder {
 public:
  explicit Decoder(Program& program);
  void decode_all();

  // Operand places. `size` is that of the instruction's type: registers must match it, immediates
  // are made in it.
  int32_t src(const Operand& o, int size);
  int32_t src(const Operand& o, Type t) { return src(o, size_of(t)); }
  int32_t dst(const Operand& o, int size);
  int32_t dst(const Operand& o, Type t) { return dst(o, size_of(t)); }
  int32_t pred(const Operand& o);  // a predicate source: its `negated` is the caller's to keep
  int32_t second(const Operand& o) const;  // the q of p|q, or the scratch slot
  int32_t any_src(const Operand& o, int& size,
                  int wanted);  // for ld, st and cvt, whose registers may be wider than the type
  int register_size(const Operand& o) const;
  int32_t constant(uint64_t bits, int size);
  uint64_t symbol_address(const std::string& name) const;
  // [reg + imm] or [symbol + imm]: a[slot] and imm; returns the size of the base register.
  int address(const Operand& o, Inst& out, int slot);
  int add_branch_table(const std::vector<int>& targets);
  void note_shared_write(int bytes);

  [[noreturn]] void fail(const std::string& what) const { throw PtxError(what); }
  const Kernel& kernel() const { return *program_.kernel; }

 private:
  void decode_one(const PtxInst& inst, Inst& out);

  Program& program_;
  RegisterMap map_;
  std::map<std::pair<uint64_t, int>, int32_t> constants_;
};

// False: the opcode's form belongs to another file (add.s32 and add.f32).
using DecodeFn = bool (*)(Decoder&, const PtxInst&, Inst&);
using DecodeTable = std::unordered_map<std::string, std::vector<DecodeFn>>;

void register_integer(DecodeTable&);
void register_carry(DecodeTable&);
void register_logic(DecodeTable&);
void register_float(DecodeTable&);
void register_math(DecodeTable&);
void register_half(DecodeTable&);
void register_convert(DecodeTable&);
void register_move(DecodeTable&);
void register_compare(DecodeTable&);
void register_memory(DecodeTable&);
void register_atomic(DecodeTable&);
void register_async(DecodeTable&);
void register_matrix(DecodeTable&);
void register_warp(DecodeTable&);
void register_control(DecodeTable&);

}  // namespace cudasim
