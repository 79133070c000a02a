// A parsed PTX module: what the text says, before registers are allocated and instructions decoded.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "types.h"

namespace cudasim {

struct PtxError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Special registers that hold one 32-bit value a lane and never change while a warp runs.
enum Special : int {
  kTidX,
  kTidY,
  kTidZ,
  kNtidX,
  kNtidY,
  kNtidZ,
  kCtaidX,
  kCtaidY,
  kCtaidZ,
  kNctaidX,
  kNctaidY,
  kNctaidZ,
  kLaneId,
  kWarpId,
  kNwarpId,
  kLanemaskEq,
  kLanemaskLt,
  kLanemaskLe,
  kLanemaskGt,
  kLanemaskGe,
  kSmId,
  kNsmId,
  kGridId,
  kDynamicSmem,
  kTotalSmem,
  kSpecialCount,
  kClock = 100,  // these change: read by an instruction of their own
};

struct Operand {
  enum class Kind : uint8_t {
    kReg,
    kSpecial,
    kInt,
    kF32,
    kF64,
    kSymbol,
    kAddress,
    kVector,
    kList,
    kSink
  };
  Kind kind = Kind::kInt;
  bool negated = false;        // !%p
  int reg = -1;                // kReg, or the base of a kAddress; kSpecial: the Special
  int second = -1;             // the q of a destination pair p|q (-1: none or a sink)
  uint64_t imm = 0;            // value or bit pattern
  int64_t offset = 0;          // kAddress, kSymbol
  std::string symbol;          // kSymbol, or the base of a kAddress
  std::vector<Operand> items;  // kVector {a, b}, kList (a, b)
};

struct PtxInst {
  std::string op;                 // "add"
  std::vector<std::string> mods;  // {"rn", "f32"}
  std::vector<Type> types;        // the mods that are types, in order
  std::vector<Operand> operands;
  std::vector<int> targets;  // of bra and brx.idx: instruction indices
  int guard = -1;
  bool guard_negated = false;
  int line = 0;  // in the PTX text, from 1
  int loc = -1;  // index into Kernel::locs
  bool has(std::string_view mod) const {
    for (const auto& m : mods)
      if (m == mod) return true;
    return false;
  }
  Type type(size_t i = 0) const { return i < types.size() ? types[i] : Type::kNone; }
};

struct Variable {
  std::string name;
  int64_t size = 0, align = 1, offset = 0;
  bool dynamic = false;  // .extern .shared x[]
};

struct Register {
  std::string name;
  Type type = Type::kNone;
};

struct Location {
  int file = 0, line = 0, column = 0;
  int inlined_at = -1;  // index of the caller's location
};

struct Kernel {
  std::string name;
  std::vector<Variable> params;
  int64_t param_size = 0;
  std::vector<Variable> shared;
  int64_t static_shared = 0;
  int64_t local_size = 0;
  std::unordered_map<std::string, int64_t>
      locals;  // name -> offset: .local variables and call parameters
  std::vector<Register> registers;
  std::vector<PtxInst> code;
  std::vector<Location> locs;
  int max_threads = 1024;
  int required_threads[3] = {0, 0, 0};  // .reqntid
  int min_ctas = 0;
};

struct GlobalVariable {
  std::string name;
  int64_t size = 0, align = 1;
  bool constant = false;
  std::vector<uint8_t> storage;                           // over-allocated: address() is aligned
  std::vector<std::pair<int64_t, std::string>> pointers;  // initialisers that are addresses
  uint8_t* address = nullptr;
};

// One PTX text. Entry bodies are parsed on first use: a module may hold hundreds.
class PtxModule {
 public:
  explicit PtxModule(std::string text);
  const std::vector<std::string>& entries() const { return entry_names_; }
  bool has_entry(const std::string& name) const { return entry_spans_.count(name) != 0; }
  std::unique_ptr<Kernel> parse_entry(const std::string& name) const;
  GlobalVariable* global(const std::string& name);
  std::map<std::string, GlobalVariable>& globals() { return globals_; }
  std::string file_name(int id) const;
  std::string line_text(int line) const;

 private:
  struct Span {
    size_t begin = 0, body = 0, end = 0;  // declaration, opening brace, past the closing brace
    int line = 0;
  };
  void scan();
  friend class BodyParser;

  std::string text_;
  std::vector<size_t> line_starts_;
  std::vector<std::string> entry_names_;
  std::unordered_map<std::string, Span> entry_spans_, function_spans_;
  std::vector<Variable> shared_;
  std::map<std::string, GlobalVariable> globals_;
  std::map<int, std::string> files_;
};

}  // namespace cudasim
