// A cursor over PTX text. PTX's grammar is simple enough to be read by recursive descent straight
// off the characters.
#pragma once

#include <cctype>
#include <cstdlib>
#include <cstring>
#include <string>
#include <string_view>

#include "ptx.h"

namespace cudasim {

class Lexer {
 public:
  Lexer(std::string_view text, size_t begin, size_t end, int line)
      : text_(text), pos_(begin), end_(end), line_(line) {}

  int line() const { return line_; }
  size_t pos() const { return pos_; }
  bool done() {
    skip_space();
    return pos_ >= end_;
  }
  char peek() {
    skip_space();
    return pos_ < end_ ? text_[pos_] : '\0';
  }
  bool accept(char c) {
    if (peek() != c) return false;
    ++pos_;
    return true;
  }
  void expect(char c) {
    if (!accept(c)) fail(std::string("expected '") + c + "', found '" + peek() + "'");
  }
  // An identifier, opcode or directive: everything up to white space or punctuation; dots and
  // colons pairs included.
  std::string_view word() {
    skip_space();
    size_t begin = pos_;
    while (pos_ < end_ && is_word(text_[pos_])) {
      if (text_[pos_] == ':' && (pos_ + 1 >= end_ || text_[pos_ + 1] != ':')) break;
      pos_ += text_[pos_] == ':' ? 2 : 1;
    }
    if (begin == pos_) fail(std::string("unexpected '") + peek() + "'");
    return text_.substr(begin, pos_ - begin);
  }
  // The rest of a line, for the directives that end with it (.loc, .file).
  std::string_view rest_of_line() {
    size_t begin = pos_;
    while (pos_ < end_ && text_[pos_] != '\n') ++pos_;
    return text_.substr(begin, pos_ - begin);
  }
  std::string quoted() {
    expect('"');
    size_t begin = pos_;
    while (pos_ < end_ && text_[pos_] != '"') ++pos_;
    return std::string(text_.substr(begin, pos_++ - begin));
  }
  void skip_past(char c) {
    while (pos_ < end_ && text_[pos_] != c) advance();
    if (pos_ < end_) ++pos_;
  }
  // Past the brace that closes the one just ahead.
  void skip_braces() {
    expect('{');
    for (int depth = 1; depth > 0;) {
      char c = peek();
      if (c == '\0') fail("unbalanced braces");
      if (c == '"') {
        quoted();
        continue;
      }
      depth += c == '{' ? 1 : c == '}' ? -1 : 0;
      ++pos_;
    }
  }
  int64_t integer() {
    bool minus = accept('-');
    std::string digits(word());
    int64_t value = static_cast<int64_t>(std::strtoull(digits.c_str(), nullptr, 0));
    return minus ? -value : value;
  }
  [[noreturn]] void fail(const std::string& what) const {
    throw PtxError("PTX line " + std::to_string(line_) + ": " + what);
  }

 private:
  static bool is_word(char c) {
    return std::isalnum(static_cast<unsigned char>(c)) || c == '_' || c == '$' || c == '%' ||
           c == '.' || c == ':';
  }
  void advance() {
    if (text_[pos_] == '\n') ++line_;
    ++pos_;
  }
  void skip_space() {
    while (pos_ < end_) {
      char c = text_[pos_];
      if (c == ' ' || c == '\t' || c == '\n' || c == '\r') {
        advance();
      } else if (c == '/' && pos_ + 1 < end_ && text_[pos_ + 1] == '/') {
        while (pos_ < end_ && text_[pos_] != '\n') ++pos_;
      } else if (c == '/' && pos_ + 1 < end_ && text_[pos_ + 1] == '*') {
        while (pos_ + 1 < end_ && !(text_[pos_] == '*' && text_[pos_ + 1] == '/')) advance();
        pos_ += 2;
      } else {
        return;
      }
    }
  }

  std::string_view text_;
  size_t pos_, end_;
  int line_;
};

// name, size, alignment of "[.align N] .type name[count]" with the space directive already read.
struct Declaration {
  std::string name;
  Type type = Type::kNone;
  int64_t count = 1, align = 0, size = 0;
  bool array = false;
};
Declaration read_declaration(Lexer& lex);

}  // namespace cudasim
