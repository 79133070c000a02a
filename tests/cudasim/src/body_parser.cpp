#include "body_parser.h"

#include <algorithm>

namespace cudasim {

std::unique_ptr<Kernel> PtxModule::parse_entry(const std::string& name) const {
  auto kernel = std::make_unique<Kernel>();
  kernel->name = name;
  BodyParser(*this, *kernel).parse(entry_spans_.at(name));
  return kernel;
}

void BodyParser::parse(const PtxModule::Span& span) {
  Lexer lex(module_.text_, span.begin, span.end, span.line);
  lex.word();  // .entry
  kernel_.name = lex.word();
  if (lex.peek() == '(') parse_params(lex, kernel_.params);
  for (auto& p : kernel_.params) {
    p.offset = align_up(kernel_.param_size, p.align);
    kernel_.param_size = p.offset + p.size;
  }
  while (lex.peek() != '{') {
    std::string_view w = lex.word();
    if (w == ".maxntid" || w == ".reqntid") {
      int dims[3] = {1, 1, 1};
      int n = 0;
      do dims[n++] = static_cast<int>(lex.integer());
      while (n < 3 && lex.accept(','));
      if (w == ".maxntid")
        kernel_.max_threads = dims[0] * dims[1] * dims[2];
      else
        std::copy(dims, dims + 3, kernel_.required_threads);
    } else if (w == ".minnctapersm") {
      kernel_.min_ctas = static_cast<int>(lex.integer());
    }
  }
  for (const auto& v : module_.shared_) kernel_.shared.push_back(v);
  lex.expect('{');
  scopes_.emplace_back();
  scope_ = 0;
  parse_block(lex);
  PtxInst end;  // falling off the end is a return
  end.op = "exit";
  end.line = lex.line();
  end.loc = loc_;
  kernel_.code.push_back(end);
  resolve_branches();
}

void BodyParser::parse_params(Lexer& lex, std::vector<Variable>& out) {
  lex.expect('(');
  while (!lex.accept(')')) {
    Declaration d = read_declaration(lex);  // reads over ".param"
    out.push_back({d.name, d.size, d.align, 0, false});
    lex.accept(',');
  }
}

void BodyParser::parse_block(Lexer& lex) {
  while (!lex.accept('}')) {
    if (lex.done()) lex.fail("unexpected end of a body");
    parse_statement(lex);
  }
}

void BodyParser::parse_statement(Lexer& lex) {
  if (lex.accept('{')) {
    scopes_.emplace_back();
    scopes_.back().parent = scope_;
    int outer = scope_;
    scope_ = static_cast<int>(scopes_.size()) - 1;
    parse_block(lex);
    scope_ = outer;
    return;
  }
  if (lex.accept(';')) return;
  guard_ = PtxInst();
  if (lex.accept('@')) {
    guard_.guard_negated = lex.accept('!');
    std::string name(lex.word());
    guard_.guard = find_register(name);
    if (guard_.guard < 0) lex.fail("unknown guard " + name);
  }
  std::string_view word = lex.word();
  if (word[0] == '.') {
    parse_directive(lex, word);
  } else if (lex.peek() == ':') {
    lex.expect(':');
    if (lex.peek() == '.') {
      Lexer ahead = lex;
      if (ahead.word() == ".branchtargets") {
        lex.word();
        auto& list = scopes_[scope_].branch_targets[std::string(word)];
        do list.push_back(std::string(lex.word()));
        while (lex.accept(','));
        lex.expect(';');
        return;
      }
    }
    scopes_[scope_].labels[std::string(word)] = static_cast<int>(kernel_.code.size());
  } else {
    parse_instruction(lex, word);
  }
}

void BodyParser::parse_directive(Lexer& lex, std::string_view word) {
  if (word == ".loc") {
    parse_loc(lex);
  } else if (word == ".reg") {
    std::string_view type_word = lex.word();
    Type type = parse_type(type_word.substr(1));
    if (type == Type::kNone) lex.fail("unsupported register type " + std::string(type_word));
    do {
      std::string name(lex.word());
      if (lex.accept('<')) {
        int count = static_cast<int>(lex.integer());
        lex.expect('>');
        int first = static_cast<int>(kernel_.registers.size());
        for (int i = 0; i < count; ++i)
          kernel_.registers.push_back({name + std::to_string(i), type});
        scopes_[scope_].families[name] = {first, count};
      } else {
        scopes_[scope_].registers[name] = new_register(name, type);
      }
    } while (lex.accept(','));
    lex.expect(';');
  } else if (word == ".local" || word == ".param") {
    Declaration d = read_declaration(lex);
    std::string unique = unique_symbol(d.name);
    scopes_[scope_].symbols[d.name] = unique;
    add_local(unique, d.size, std::max<int64_t>(d.align, 8));
    lex.expect(';');
  } else if (word == ".shared") {
    Declaration d = read_declaration(lex);
    add_shared({d.name, d.size, d.align, 0, d.array && d.size == 0});
    lex.expect(';');
  } else if (word == ".pragma") {
    lex.skip_past(';');
  } else if (word == ".extern") {
    return;
  } else {
    lex.fail("unsupported directive " + std::string(word));
  }
}

void BodyParser::parse_loc(Lexer& lex) {
  Location loc;
  loc.file = static_cast<int>(lex.integer());
  loc.line = static_cast<int>(lex.integer());
  loc.column = static_cast<int>(lex.integer());
  std::string rest(lex.rest_of_line());
  size_t at = rest.find("inlined_at");
  if (at != std::string::npos) {
    int file = 0, line = 0, column = 0;
    std::sscanf(rest.c_str() + at, "inlined_at %d %d %d", &file, &line, &column);
    // the caller's own .loc was emitted before; the newest one with this position is the one meant
    auto [it, added] =
        newest_loc_.try_emplace({file, line, column}, static_cast<int>(kernel_.locs.size()));
    if (added) kernel_.locs.push_back({file, line, column, -1});
    loc.inlined_at = it->second;
  }
  loc_ = static_cast<int>(kernel_.locs.size());
  kernel_.locs.push_back(loc);
  newest_loc_[{loc.file, loc.line, loc.column}] = loc_;
}

void BodyParser::parse_instruction(Lexer& lex, std::string_view opcode) {
  PtxInst inst = guard_;
  inst.line = lex.line();
  inst.loc = loc_;
  size_t begin = 0;
  for (bool first = true; begin <= opcode.size(); first = false) {
    size_t end = std::min(opcode.find('.', begin), opcode.size());
    std::string part(opcode.substr(begin, end - begin));
    begin = end + 1;
    if (first) {
      inst.op = part;
      continue;
    }
    Type type = parse_type(part);
    if (type != Type::kNone) inst.types.push_back(type);
    inst.mods.push_back(std::move(part));
  }
  if (inst.op == "call") return parse_call(lex, inst);
  if (inst.op == "bra" || inst.op == "brx") {
    if (inst.op == "brx") {
      inst.operands.push_back(parse_operand(lex));
      lex.expect(',');
    }
    std::string label(lex.word());
    branches_.push_back({static_cast<int>(kernel_.code.size()), scope_, label});
    lex.expect(';');
    kernel_.code.push_back(std::move(inst));
    return;
  }
  if (lex.peek() != ';') {
    do inst.operands.push_back(parse_operand(lex));
    while (lex.accept(','));
  }
  lex.expect(';');
  if (inst.op == "ret" &&
      !return_labels_.empty()) {  // inside an inlined function: a jump to its end
    inst.op = "bra";
    branches_.push_back({static_cast<int>(kernel_.code.size()), return_labels_.back(), "$return"});
  }
  kernel_.code.push_back(std::move(inst));
}

void BodyParser::parse_call(Lexer& lex, PtxInst& inst) {
  inst.operands.resize(3);
  inst.operands[0].kind = inst.operands[2].kind = Operand::Kind::kList;
  if (lex.peek() == '(') {
    inst.operands[0] = parse_operand(lex);
    lex.expect(',');
  }
  std::string callee(lex.word());
  inst.operands[1].kind = Operand::Kind::kSymbol;
  inst.operands[1].symbol = callee;
  if (lex.accept(',')) {
    inst.operands[2] = parse_operand(lex);
    if (lex.accept(',')) lex.word();  // the prototype of an indirect call
  }
  lex.expect(';');
  auto it = module_.function_spans_.find(callee);
  if (it == module_.function_spans_.end()) {  // vprintf, __assertfail: built in
    kernel_.code.push_back(std::move(inst));
    return;
  }
  if (inst.guard >= 0) lex.fail("a guarded call of a function is not supported");
  if (std::count(call_stack_.begin(), call_stack_.end(), callee))
    lex.fail("recursion is not supported: " + callee);
  call_stack_.push_back(callee);
  inline_call(it->second, inst);
  call_stack_.pop_back();
}

void BodyParser::inline_call(const PtxModule::Span& span, const PtxInst& call) {
  Lexer lex(module_.text_, span.begin, span.end, span.line);
  lex.word();  // .func
  std::vector<Variable> results, params;
  while (lex.peek() == '.') lex.word();
  if (lex.peek() == '(') parse_params(lex, results);
  lex.word();
  if (lex.peek() == '(') parse_params(lex, params);
  while (lex.peek() != '{') lex.word();
  lex.expect('{');
  int outer = scope_, loc = loc_;
  scopes_.emplace_back();  // no parent: the callee sees nothing of its caller
  scope_ = static_cast<int>(scopes_.size()) - 1;
  auto bind = [&](const std::vector<Variable>& formal, const Operand& actual) {
    for (size_t i = 0; i < formal.size() && i < actual.items.size(); ++i)
      scopes_[scope_].symbols[formal[i].name] = actual.items[i].symbol;
  };
  bind(results, call.operands[0]);
  bind(params, call.operands[2]);
  return_labels_.push_back(scope_);
  int callee_scope = scope_;
  parse_block(lex);
  return_labels_.pop_back();
  scopes_[callee_scope].labels["$return"] = static_cast<int>(kernel_.code.size());
  scope_ = outer;
  loc_ = loc;
}

void BodyParser::resolve_branches() {
  for (const auto& branch : branches_) {
    auto find_label = [&](const std::string& label) {
      for (int s = branch.scope; s >= 0; s = scopes_[s].parent) {
        auto it = scopes_[s].labels.find(label);
        if (it != scopes_[s].labels.end()) return it->second;
      }
      throw PtxError("PTX line " + std::to_string(kernel_.code[branch.inst].line) +
                     ": unknown label " + label);
    };
    PtxInst& inst = kernel_.code[branch.inst];
    if (inst.op == "bra") {
      inst.targets.push_back(find_label(branch.label));
      continue;
    }
    for (int s = branch.scope; s >= 0 && inst.targets.empty(); s = scopes_[s].parent) {
      auto it = scopes_[s].branch_targets.find(branch.label);
      if (it == scopes_[s].branch_targets.end()) continue;
      for (const auto& label : it->second) inst.targets.push_back(find_label(label));
    }
  }
  // module-level shared variables count only where the body names them
  std::vector<Variable> used;
  auto names = [&](const std::string& name) {
    for (const auto& inst : kernel_.code)
      for (const auto& o : inst.operands)
        if (o.symbol == name) return true;
    return false;
  };
  int64_t dynamic_align = 16;
  for (auto& v : kernel_.shared)
    if (names(v.name)) used.push_back(v);
  for (auto& v : used) {
    if (v.dynamic) {
      dynamic_align = std::max(dynamic_align, v.align);
      continue;
    }
    v.offset = align_up(kernel_.static_shared, v.align);
    kernel_.static_shared = v.offset + v.size;
  }
  for (auto& v : used)
    if (v.dynamic) v.offset = align_up(kernel_.static_shared, dynamic_align);
  kernel_.shared = std::move(used);
}

}  // namespace cudasim
