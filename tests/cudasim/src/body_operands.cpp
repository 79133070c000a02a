// Operands, registers and symbols of a body.
#include <cstdlib>
#include <cstring>

#include "body_parser.h"

namespace cudasim {

namespace {

const std::unordered_map<std::string_view, int> kSpecials = {{"%tid.x", kTidX},
                                                             {"%tid.y", kTidY},
                                                             {"%tid.z", kTidZ},
                                                             {"%ntid.x", kNtidX},
                                                             {"%ntid.y", kNtidY},
                                                             {"%ntid.z", kNtidZ},
                                                             {"%ctaid.x", kCtaidX},
                                                             {"%ctaid.y", kCtaidY},
                                                             {"%ctaid.z", kCtaidZ},
                                                             {"%nctaid.x", kNctaidX},
                                                             {"%nctaid.y", kNctaidY},
                                                             {"%nctaid.z", kNctaidZ},
                                                             {"%laneid", kLaneId},
                                                             {"%warpid", kWarpId},
                                                             {"%nwarpid", kNwarpId},
                                                             {"%lanemask_eq", kLanemaskEq},
                                                             {"%lanemask_lt", kLanemaskLt},
                                                             {"%lanemask_le", kLanemaskLe},
                                                             {"%lanemask_gt", kLanemaskGt},
                                                             {"%lanemask_ge", kLanemaskGe},
                                                             {"%smid", kSmId},
                                                             {"%nsmid", kNsmId},
                                                             {"%gridid", kGridId},
                                                             {"%dynamic_smem_size", kDynamicSmem},
                                                             {"%total_smem_size", kTotalSmem},
                                                             {"%clock", kClock},
                                                             {"%clock64", kClock},
                                                             {"%clock_hi", kClock},
                                                             {"%globaltimer", kClock},
                                                             {"%globaltimer_lo", kClock},
                                                             {"%globaltimer_hi", kClock}};

}  // namespace

Operand BodyParser::parse_operand(Lexer& lex) {
  Operand o;
  if (lex.peek() == '{' || lex.peek() == '(') {
    bool vector = lex.accept('{');
    if (!vector) lex.expect('(');
    char close = vector ? '}' : ')';
    o.kind = vector ? Operand::Kind::kVector : Operand::Kind::kList;
    while (!lex.accept(close)) {
      o.items.push_back(parse_operand(lex));
      lex.accept(',');
    }
    return o;
  }
  if (lex.accept('[')) {
    Operand base = parse_operand(lex);
    o.kind = Operand::Kind::kAddress;
    o.offset = base.offset;
    if (base.kind == Operand::Kind::kReg)
      o.reg = base.reg;
    else if (base.kind == Operand::Kind::kSymbol)
      o.symbol = base.symbol;
    else
      o.offset = static_cast<int64_t>(base.imm);
    if (lex.accept('+')) o.offset += lex.integer();
    if (lex.accept(',')) lex.fail("tensor coordinates are not supported");
    lex.expect(']');
    return o;
  }
  bool negated = lex.accept('!');
  bool minus = lex.accept('-');
  std::string_view word = lex.word();
  if (minus || std::isdigit(static_cast<unsigned char>(word[0])))
    return parse_number(lex, word, minus);
  o = parse_name(lex, word);
  o.negated = negated;
  if (lex.accept('|')) {
    Operand q = parse_name(lex, lex.word());
    o.second = q.kind == Operand::Kind::kReg ? q.reg : -1;
  }
  if (o.kind == Operand::Kind::kSymbol && lex.accept('+')) o.offset = lex.integer();
  return o;
}

Operand BodyParser::parse_number(Lexer& lex, std::string_view w, bool minus) {
  Operand o;
  std::string word(w);
  if (w.size() > 2 && w[0] == '0' && (w[1] == 'f' || w[1] == 'F' || w[1] == 'd' || w[1] == 'D')) {
    bool single = w[1] == 'f' || w[1] == 'F';
    o.kind = single ? Operand::Kind::kF32 : Operand::Kind::kF64;
    o.imm = std::strtoull(word.c_str() + 2, nullptr, 16);
    if (minus) o.imm ^= single ? 0x80000000u : 0x8000000000000000u;
    return o;
  }
  if (word.find('.') != std::string::npos) {
    double value = std::strtod(word.c_str(), nullptr);
    if (minus) value = -value;
    o.kind = Operand::Kind::kF64;
    std::memcpy(&o.imm, &value, 8);
    return o;
  }
  (void)lex;
  o.imm = std::strtoull(word.c_str(), nullptr, 0);
  if (minus) o.imm = 0 - o.imm;
  return o;
}

Operand BodyParser::parse_name(Lexer& lex, std::string_view word) {
  Operand o;
  std::string name(word);
  if (name == "_") {
    o.kind = Operand::Kind::kSink;
    return o;
  }
  if (auto it = kSpecials.find(word); it != kSpecials.end()) {
    o.kind = Operand::Kind::kSpecial;
    o.reg = it->second;
    o.symbol = name;
    return o;
  }
  if (int reg = find_register(name); reg >= 0) {
    o.kind = Operand::Kind::kReg;
    o.reg = reg;
    return o;
  }
  if (name[0] == '%') lex.fail("unknown register " + name);
  o.kind = Operand::Kind::kSymbol;
  o.symbol = name;
  for (int s = scope_; s >= 0; s = scopes_[s].parent) {
    auto it = scopes_[s].symbols.find(name);
    if (it != scopes_[s].symbols.end()) {
      o.symbol = it->second;
      break;
    }
  }
  return o;
}

int BodyParser::find_register(const std::string& name) {
  size_t digits = name.size();
  while (digits > 0 && std::isdigit(static_cast<unsigned char>(name[digits - 1]))) --digits;
  for (int s = scope_; s >= 0; s = scopes_[s].parent) {
    auto it = scopes_[s].registers.find(name);
    if (it != scopes_[s].registers.end()) return it->second;
    if (digits == name.size()) continue;
    auto family = scopes_[s].families.find(name.substr(0, digits));
    if (family == scopes_[s].families.end()) continue;
    int index = std::atoi(name.c_str() + digits);
    if (index < family->second.count) return family->second.first + index;
  }
  return -1;
}

int BodyParser::new_register(const std::string& name, Type type) {
  kernel_.registers.push_back({name, type});
  return static_cast<int>(kernel_.registers.size()) - 1;
}

std::string BodyParser::unique_symbol(const std::string& name) {
  return kernel_.locals.count(name) ? name + "$" + std::to_string(++unique_) : name;
}

void BodyParser::add_local(const std::string& name, int64_t size, int64_t align) {
  kernel_.local_size = align_up(kernel_.local_size, align);
  kernel_.locals[name] = kernel_.local_size;
  kernel_.local_size += size;
}

void BodyParser::add_shared(const Variable& var) {
  for (const auto& v : kernel_.shared)
    if (v.name == var.name) return;
  kernel_.shared.push_back(var);
}

}  // namespace cudasim
