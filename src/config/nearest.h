// Which known key was probably meant.
#pragma once

#include <string>
#include <string_view>

namespace zerofp8 {

// Edit distance with swaps of neighbours ("bukcet" is 1 from "bucket").
int edit_distance(std::string_view a, std::string_view b);

std::string lower_case(std::string_view text);

// The known key that an unknown one was probably meant to be: a sibling if one is near, else a key
// of that name elsewhere, else "".
std::string nearest_key(std::string_view unknown_path);

}  // namespace zerofp8
