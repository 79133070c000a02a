// The module level of a PTX text: entries, functions, global variables, file names.
#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "lexer.h"
#include "ptx.h"

namespace cudasim {

Type parse_type(std::string_view s) {
  static const std::unordered_map<std::string_view, Type> kTypes = {
      {"pred", Type::kPred}, {"b8", Type::kB8},       {"u8", Type::kU8},
      {"s8", Type::kS8},     {"b16", Type::kB16},     {"u16", Type::kU16},
      {"s16", Type::kS16},   {"f16", Type::kF16},     {"bf16", Type::kBF16},
      {"b32", Type::kB32},   {"u32", Type::kU32},     {"s32", Type::kS32},
      {"f32", Type::kF32},   {"f16x2", Type::kF16x2}, {"bf16x2", Type::kBF16x2},
      {"tf32", Type::kTF32}, {"b64", Type::kB64},     {"u64", Type::kU64},
      {"s64", Type::kS64},   {"f64", Type::kF64}};
  auto it = kTypes.find(s);
  return it == kTypes.end() ? Type::kNone : it->second;
}

Declaration read_declaration(Lexer& lex) {
  Declaration d;
  while (lex.peek() == '.') {
    std::string_view w = lex.word();
    if (w == ".align") {
      d.align = lex.integer();
    } else if (w == ".ptr" || w == ".global" || w == ".shared" || w == ".const" || w == ".local") {
      // attributes of a pointer parameter: its space and alignment say nothing about the parameter
      // itself
      if (w == ".ptr") {
        while (lex.peek() == '.') {
          if (lex.word() == ".align") lex.integer();
        }
      }
    } else if (w == ".v2" || w == ".v4") {
      d.count *= w == ".v2" ? 2 : 4;
    } else {
      Type t = parse_type(w.substr(1));
      if (t != Type::kNone) d.type = t;
    }
  }
  d.name = std::string(lex.word());
  while (lex.accept('[')) {
    d.array = true;
    d.count *= lex.peek() == ']' ? 0 : lex.integer();
    lex.expect(']');
  }
  d.size = d.count * size_of(d.type);
  if (d.align == 0) d.align = std::max<int64_t>(1, size_of(d.type));
  return d;
}

PtxModule::PtxModule(std::string text) : text_(std::move(text)) {
  line_starts_.push_back(0);
  for (size_t i = 0; i < text_.size(); ++i)
    if (text_[i] == '\n') line_starts_.push_back(i + 1);
  scan();
}

std::string PtxModule::line_text(int line) const {
  if (line < 1 || line > static_cast<int>(line_starts_.size())) return "";
  size_t begin = line_starts_[line - 1];
  size_t end = text_.find('\n', begin);
  std::string s = text_.substr(begin, end == std::string::npos ? end : end - begin);
  size_t first = s.find_first_not_of(" \t"), last = s.find_last_not_of(" \t\r");
  if (first == std::string::npos) return "";
  s = s.substr(first, last - first + 1);
  std::replace(s.begin(), s.end(), '\t', ' ');
  return s;
}

std::string PtxModule::file_name(int id) const {
  auto it = files_.find(id);
  return it == files_.end() ? "?" : it->second;
}

GlobalVariable* PtxModule::global(const std::string& name) {
  auto it = globals_.find(name);
  return it == globals_.end() ? nullptr : &it->second;
}

namespace {

double float_literal(std::string_view w) {
  uint64_t bits = std::strtoull(std::string(w.substr(2)).c_str(), nullptr, 16);
  if (w[1] == 'f' || w[1] == 'F') {
    float f;
    uint32_t b32 = static_cast<uint32_t>(bits);
    std::memcpy(&f, &b32, 4);
    return f;
  }
  double d;
  std::memcpy(&d, &bits, 8);
  return d;
}

bool is_float_literal(std::string_view w) {
  return w.size() > 2 && w[0] == '0' && std::strchr("fFdD", w[1]) && !std::strchr("xX", w[1]);
}

void read_initialiser(Lexer& lex, const Declaration& d, GlobalVariable& var, uint8_t* base) {
  int element = size_of(d.type);
  int64_t offset = 0;
  bool list = lex.accept('{');
  int depth = list ? 1 : 0;
  do {
    while (lex.accept('{')) ++depth;
    char c = lex.peek();
    if (c != '}') {
      bool minus = lex.accept('-');
      std::string_view w = lex.word();
      if (w ==
          "generic") {  // generic(symbol): a generic address; global addresses are generic already
        lex.expect('(');
        w = lex.word();
        lex.expect(')');
      }
      std::string word(w);
      if (is_float_literal(w)) {
        double v = minus ? -float_literal(w) : float_literal(w);
        float f = static_cast<float>(v);
        if (element == 8)
          std::memcpy(base + offset, &v, 8);
        else
          std::memcpy(base + offset, &f, 4);
      } else if (std::isdigit(static_cast<unsigned char>(w[0]))) {
        uint64_t v = std::strtoull(word.c_str(), nullptr, 0);
        if (minus) v = 0 - v;
        if (offset + element <= d.size) std::memcpy(base + offset, &v, element);
      } else {
        int64_t addend = lex.accept('+') ? lex.integer() : 0;
        uint64_t a = static_cast<uint64_t>(addend);
        std::memcpy(base + offset, &a, 8);
        var.pointers.push_back({offset, word});
      }
      offset += element;
    }
    while (depth > 0 && lex.accept('}')) --depth;
  } while (lex.accept(','));
}

}  // namespace

void PtxModule::scan() {
  Lexer lex(text_, 0, text_.size(), 1);
  while (!lex.done()) {
    size_t begin = lex.pos();
    int line = lex.line();
    std::string_view w = lex.word();
    if (w == ".version" || w == ".target" || w == ".address_size") {
      lex.rest_of_line();
    } else if (w == ".file") {
      int id = static_cast<int>(lex.integer());
      files_[id] = lex.quoted();
      lex.rest_of_line();
    } else if (w == ".section") {
      while (lex.peek() != '{') lex.word();
      lex.skip_braces();
    } else if (w == ".entry" || w == ".func") {
      while (lex.peek() == '.') lex.word();     // .noreturn
      if (lex.accept('(')) lex.skip_past(')');  // the return parameter
      std::string name(lex.word());
      while (lex.peek() != '{' && lex.peek() != ';') {
        if (lex.accept('('))
          lex.skip_past(')');
        else if (!lex.accept(','))
          lex.word();
      }
      if (lex.accept(';')) continue;  // a forward declaration
      Span span{begin, lex.pos(), 0, line};
      lex.skip_braces();
      span.end = lex.pos();
      if (w == ".entry" && !entry_spans_.count(name)) entry_names_.push_back(name);
      (w == ".entry" ? entry_spans_ : function_spans_)[name] = span;
    } else if (w == ".global" || w == ".const") {
      Declaration d = read_declaration(lex);
      GlobalVariable& var = globals_[d.name];
      var.name = d.name;
      var.constant = w == ".const";
      var.size = d.size;
      var.align = std::max<int64_t>(d.align, 16);
      var.storage.assign(d.size + 2 * var.align, 0);
      uintptr_t raw = reinterpret_cast<uintptr_t>(var.storage.data());
      var.address = reinterpret_cast<uint8_t*>((raw + var.align - 1) / var.align * var.align);
      if (lex.accept('=')) read_initialiser(lex, d, var, var.address);
      lex.expect(';');
    } else if (w == ".shared") {
      Declaration d = read_declaration(lex);
      shared_.push_back({d.name, d.size, d.align, 0, d.array && d.size == 0});
      lex.expect(';');
    } else if (w == ".pragma") {
      lex.skip_past(';');
    } else if (w == ".visible" || w == ".weak" || w == ".extern" || w == ".common") {
      continue;
    } else {
      lex.fail("unknown directive " + std::string(w));
    }
  }
  for (auto& [name, var] : globals_) {
    for (auto& [offset, symbol] : var.pointers) {
      auto it = globals_.find(symbol);
      if (it == globals_.end()) continue;
      uint64_t address;
      std::memcpy(&address, var.address + offset, 8);
      address += reinterpret_cast<uint64_t>(it->second.address);
      std::memcpy(var.address + offset, &address, 8);
    }
  }
}

}  // namespace cudasim
