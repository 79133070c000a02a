// Device printf and assert.
#pragma once

#include <cstdint>
#include <string>

namespace cudasim {

struct Cta;
struct Warp;

// `format` and `arguments` hold a generic address each: of the format string and of the packed
// arguments.
void device_printf(Cta& cta, Warp& w, int lane, const uint8_t* format, const uint8_t* arguments);
std::string device_assert_message(Cta& cta, const uint8_t* message, const uint8_t* file,
                                  const uint8_t* line);

}  // namespace cudasim
