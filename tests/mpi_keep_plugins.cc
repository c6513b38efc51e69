// Linked into MPI tests. Open MPI unloads its plug-ins at the end; leak reports could then not name
// them, nor lsan.supp match them. So under AddressSanitizer nothing is unloaded.
#if defined(__SANITIZE_ADDRESS__)
extern "C" int dlclose(void*) noexcept { return 0; }
#endif
