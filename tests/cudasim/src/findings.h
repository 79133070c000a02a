// What the checks report.
#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <vector>

namespace cudasim {

struct Finding {
  std::string kind;  // "shared_race", "global_out_of_bounds", ...
  std::string message;
  std::string kernel;
  int ptx_line = 0;
  std::string ptx;                 // the instruction's text
  std::string source;              // file:line of the innermost inlined function
  std::vector<std::string> stack;  // callers, innermost first
  int block[3] = {0, 0, 0};
  int thread = -1;  // linear index in the block; -1: the whole warp or block
  int warp = -1;
  uint64_t count = 1;  // how often this instruction gave this kind
};

struct Program;

// The findings of one launch, one entry per kind and instruction.
class FindingSink {
 public:
  explicit FindingSink(const Program* program) : program_(program) {}
  void add(const char* kind, int pc, const int* block, int warp, int thread,
           const std::string& message);
  bool any() const { return any_; }
  std::vector<Finding> take();

 private:
  const Program* program_;
  std::mutex mutex_;
  std::map<std::pair<std::string, int>, Finding> findings_;
  volatile bool any_ = false;
};

void describe_location(const Program& program, int pc, Finding& out);

}  // namespace cudasim
