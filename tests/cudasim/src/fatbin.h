// The container that nvcc puts PTX and cubins in.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace cudasim {

// The PTX texts of a fat binary, as __cudaRegisterFatBinary's wrapper points to it. Throws PtxError
// when the PTX is compressed (compile with -no-compress) or the container is malformed.
std::vector<std::string> read_fatbin(const void* data);

// The PTX texts of a file: PTX itself, a fatbin, or an ELF object or library with an .nv_fatbin
// section.
std::vector<std::string> read_ptx_file(const std::string& path);

}  // namespace cudasim
