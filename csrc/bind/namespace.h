// The ops' namespace. The simulator's build registers the same ops a second time under another
// name.
#pragma once

#ifndef LIGHTTRANSFER_NAMESPACE
#define LIGHTTRANSFER_NAMESPACE lighttransfer
#endif
