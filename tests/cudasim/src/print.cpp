#include "print.h"

#include <cstdio>
#include <cstring>

#include "cta.h"

namespace cudasim {

namespace {

uint64_t word_at(const uint8_t* p) {
  uint64_t v;
  std::memcpy(&v, p, 8);
  return v;
}

std::string string_at(Cta& cta, uint64_t address) {
  std::string s;
  for (; cta.launch->buffers->find(address, 1) && *reinterpret_cast<const char*>(address);
       ++address)
    s += *reinterpret_cast<const char*>(address);
  return s;
}

// The host's view of a generic address into the lane's local memory.
const uint8_t* local_at(Warp& w, int lane, uint64_t address) {
  const int64_t size = w.cta->program->kernel->local_size;
  const int64_t offset = static_cast<int64_t>(address - kLocalWindow - kLocalBase);
  return offset >= 0 && offset < size ? w.local + lane * size + offset : nullptr;
}

}  // namespace

void device_printf(Cta& cta, Warp& w, int lane, const uint8_t* format, const uint8_t* arguments) {
  const std::string f = string_at(cta, word_at(format));
  const uint8_t* base = local_at(w, lane, word_at(arguments));
  size_t offset = 0;
  auto take = [&](size_t bytes) {
    offset = (offset + bytes - 1) / bytes * bytes;
    uint64_t v = 0;
    if (base) std::memcpy(&v, base + offset, bytes);
    offset += bytes;
    return v;
  };
  std::string text;
  for (size_t i = 0; i < f.size(); ++i) {
    if (f[i] != '%') {
      text += f[i];
      continue;
    }
    size_t end = f.find_first_of("diouxXeEfFgGaAcspn%", i + 1);
    if (end == std::string::npos) break;
    std::string spec = f.substr(i, end - i + 1);
    i = end;
    char piece[256] = "";
    const char c = f[end];
    if (c == '%') {
      text += '%';
    } else if (std::strchr("eEfFgGaA", c)) {
      uint64_t bits = take(8);
      double d;
      std::memcpy(&d, &bits, 8);
      std::snprintf(piece, sizeof piece, spec.c_str(), d);
    } else if (c == 's') {
      text += string_at(cta, take(8));
    } else if (c == 'p' || spec.find('l') != std::string::npos ||
               spec.find('z') != std::string::npos) {
      std::snprintf(piece, sizeof piece, spec.c_str(), take(8));
    } else {
      std::snprintf(piece, sizeof piece, spec.c_str(), static_cast<uint32_t>(take(4)));
    }
    text += piece;
  }
  std::fputs(text.c_str(), stdout);
  std::fflush(stdout);
}

std::string device_assert_message(Cta& cta, const uint8_t* message, const uint8_t* file,
                                  const uint8_t* line) {
  uint32_t number;
  std::memcpy(&number, line, 4);
  return "assertion " + string_at(cta, word_at(message)) + " failed at " +
         string_at(cta, word_at(file)) + ":" + std::to_string(number);
}

}  // namespace cudasim
