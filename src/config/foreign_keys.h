// Keys of a file that no row knows: comments, keys of other programs, and mistakes.
#pragma once

#include <string_view>

namespace zerofp8 {

// "_comment", "// why": passed over in the objects where DeepSpeed passes over any unknown key.
bool is_comment(std::string_view parent, std::string_view name);
// Whether an unknown key at the top seems meant for zerofp8 or DeepSpeed: a key that is known
// elsewhere or mistyped, or one that speaks of dtypes, batches and the like. It is refused; others
// are passed over with a warning, as DeepSpeed passes over all of them.
bool seems_meant(std::string_view path);

}  // namespace zerofp8
