// The decoded form of an instruction: one handler and the places of its operands.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "ptx.h"

namespace cudasim {

struct Warp;
struct Inst;

enum class Step : uint8_t {
  kNext,       // go on behind this instruction
  kBranch,     // lanes Warp::taken go to Inst::target, the rest behind this instruction
  kMultiway,   // Warp::splits was edited by the handler
  kWaitLanes,  // this split must wait until other lanes of its warp arrive here
  kBarrier,    // this split waits at a barrier of the CTA
  kExit,       // the executing lanes are done
  kAbort,      // the launch cannot go on
};
using Handler = Step (*)(Warp&, const Inst&, uint32_t mask);

enum class InstClass : uint8_t {
  kMma,
  kLdmatrix,
  kMufu,
  kFp32,
  kFp64,
  kHalf,
  kInteger,
  kLogic,
  kMove,
  kConvert,
  kCompare,
  kSelect,
  kLoadGlobal,
  kStoreGlobal,
  kLoadShared,
  kStoreShared,
  kLoadLocal,
  kStoreLocal,
  kLoadParam,
  kLoadGeneric,
  kStoreGeneric,
  kCpAsync,
  kAtomic,
  kShuffle,
  kVote,
  kBarrier,
  kWarpSync,
  kBranch,
  kOther,
  kCount,
};
const char* class_name(InstClass c);

constexpr int32_t kConstBit =
    INT32_MIN;  // an operand offset with this bit lies in the constant pool

struct Inst {
  Handler fn = nullptr;
  int32_t guard = -1;  // offset of the predicate's mask in the warp's file; -1: none
  bool guard_negated = false;
  bool negate[3] = {};  // of predicate sources
  InstClass cls = InstClass::kOther;
  uint8_t flags = 0;
  int32_t target = 0;  // bra
  int32_t p[4] = {};   // small parameters, by instruction
  int64_t imm = 0;     // address offset
  int32_t a[18] = {};  // operand offsets: destinations first
};

struct Program {
  std::shared_ptr<PtxModule> module;
  std::shared_ptr<const Kernel> kernel;
  std::vector<Inst> code;
  std::shared_ptr<std::vector<uint8_t>> consts_storage = std::make_shared<std::vector<uint8_t>>();
  const uint8_t* consts = nullptr;
  int64_t file_bytes = 0;  // one warp's register file
  int granule_shift = 2;   // log2 of the bytes that the shared-memory shadow tells apart
  std::vector<std::vector<int>> branch_tables;
  std::vector<std::string> messages;  // of instructions that decode to "unsupported"
};

std::shared_ptr<Program> build_program(std::shared_ptr<PtxModule> module, const std::string& entry);
// The same program with one instruction taken out; it shares everything but the code.
std::shared_ptr<Program> delete_instruction(const Program& program, int index);

}  // namespace cudasim
