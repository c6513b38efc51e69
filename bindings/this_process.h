// Objects that threads of this process serve.
#pragma once

#include <unistd.h>

#include <memory>

namespace zerofp8::python {

// Destroyed in the process that made it only. A forked process (a DataLoader's worker) inherits the
// object but not its threads: a destructor there would wait for these for ever, be it in a join or
// for a condition variable that has no waiters any more. What the child has is left to its end.
template <class T>
std::shared_ptr<T> of_this_process(std::unique_ptr<T> made) {
  return std::shared_ptr<T>(made.release(), [pid = ::getpid()](T* object) {
    if (::getpid() == pid) delete object;
  });
}

}  // namespace zerofp8::python
