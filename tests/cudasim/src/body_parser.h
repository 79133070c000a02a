// Parses the body of one .entry; calls of .func are inlined, so that the rest of the simulator sees
// straight code.
#pragma once

#include <array>

#include "lexer.h"
#include "ptx.h"

namespace cudasim {

constexpr int64_t align_up(int64_t x, int64_t alignment) {
  return (x + alignment - 1) / alignment * alignment;
}

class BodyParser {
 public:
  BodyParser(const PtxModule& module, Kernel& kernel) : module_(module), kernel_(kernel) {}
  void parse(const PtxModule::Span& span);

 private:
  struct Family {  // .reg .b32 %r<100>;
    int first = 0, count = 0;
  };
  struct Scope {
    int parent = -1;
    std::unordered_map<std::string, int> registers, labels;
    std::unordered_map<std::string, Family> families;
    std::unordered_map<std::string, std::string> symbols;  // local name -> unique name
    std::unordered_map<std::string, std::vector<std::string>> branch_targets;
  };
  struct PendingBranch {
    int inst, scope;
    std::string label;
  };

  void parse_block(Lexer& lex);
  void parse_statement(Lexer& lex);
  void parse_directive(Lexer& lex, std::string_view word);
  void parse_loc(Lexer& lex);
  void parse_instruction(Lexer& lex, std::string_view opcode);
  void parse_call(Lexer& lex, PtxInst& inst);
  void inline_call(const PtxModule::Span& span, const PtxInst& call);
  void parse_params(Lexer& lex, std::vector<Variable>& out);
  Operand parse_operand(Lexer& lex);
  Operand parse_number(Lexer& lex, std::string_view word, bool minus);
  Operand parse_name(Lexer& lex, std::string_view word);
  int find_register(const std::string& name);
  int new_register(const std::string& name, Type type);
  std::string unique_symbol(const std::string& name);
  void add_local(const std::string& name, int64_t size, int64_t align);
  void add_shared(const Variable& var);
  void resolve_branches();

  const PtxModule& module_;
  Kernel& kernel_;
  std::vector<Scope> scopes_;
  int scope_ = -1;
  std::vector<PendingBranch> branches_;
  std::map<std::array<int, 3>, int> newest_loc_;  // (file, line, column) -> index into Kernel::locs
  std::vector<int> return_labels_;                // one per function being inlined
  std::vector<std::string> call_stack_;
  int loc_ = -1, unique_ = 0;
  PtxInst guard_;  // of the statement being parsed
};

}  // namespace cudasim
