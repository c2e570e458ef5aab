/* The plain C ABI of liblongleaf_kernels: no C++ types, no torch.
 *
 * Every function returns an int status: 0 is success, a negative value is one of the codes below,
 * a positive one is a cudaError_t. Device pointers, strides in elements unless a name says bytes.
 * Launches go to the caller's stream, allocate nothing and never synchronise with the host, so
 * they can be captured into a CUDA graph; all workspace belongs to the caller.
 */
#ifndef LONGLEAF_CAPI_H
#define LONGLEAF_CAPI_H

#if defined(__cplusplus)
#define LONGLEAF_API extern "C" __attribute__((visibility("default")))
#else
#define LONGLEAF_API __attribute__((visibility("default")))
#endif

enum longleaf_status {
  LONGLEAF_OK = 0,
  LONGLEAF_BAD_ARGUMENT = -1, /* a size, pointer, alignment or option that no launcher takes */
  LONGLEAF_NOT_BUILT = -2     /* a valid case for which no kernel was instantiated */
};

/* A static English message for any status of this library. */
LONGLEAF_API const char* longleaf_error_string(int status);

/* Goes up whenever a signature changes; the Python side refuses another number. */
#define LONGLEAF_ABI_VERSION 3
LONGLEAF_API int longleaf_abi_version(void);

/* The targets that this build holds machine code for, such as "90a;120a". */
LONGLEAF_API const char* longleaf_cuda_archs(void);

#endif
