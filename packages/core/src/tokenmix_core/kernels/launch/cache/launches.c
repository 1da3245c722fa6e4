// Make consecutive launches by one call from Python, without lookups, conversions and allocations.

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <cuda.h>
#include <stdint.h>
#include <string.h>

enum { MAX_ADDRESSES = 256, MAX_PARAMETERS = 96 };

typedef CUresult (*Launch)(const CUlaunchConfig *config, CUfunction function, void **parameters, void **extra);

// packed by kernels/launch/cache/driver.py: a Head, the parameters (one word each), and Pointers: parameters that are addresses
typedef struct {
    Launch launch;
    CUfunction function;
    uint64_t grid[3], threads, shared, pdl, parameters, pointers;
} Head;
typedef struct {
    uint64_t parameter, address, offset;
} Pointer;

// launch(packed, stream, *addresses)
static PyObject *launch(PyObject *self, PyObject *const *args, Py_ssize_t number) {
    uint64_t addresses[MAX_ADDRESSES], values[MAX_PARAMETERS];
    void *parameters[MAX_PARAMETERS];
    if (number < 2 || number > MAX_ADDRESSES || !PyBytes_Check(args[0])) {
        PyErr_SetString(PyExc_TypeError, "launch(packed, stream, *addresses) takes bytes and up to 255 integers");
        return NULL;
    }
    for (Py_ssize_t i = 1; i < number; i++) {
        addresses[i - 1] = PyLong_AsUnsignedLongLong(args[i]);
    }
    if (PyErr_Occurred()) {
        return NULL;
    }
    const char *at = PyBytes_AS_STRING(args[0]), *end = at + PyBytes_GET_SIZE(args[0]);
    for (int i = 0; i < MAX_PARAMETERS; i++) {
        parameters[i] = &values[i];
    }
    // the first launch of a thread makes the device's context current
    static _Thread_local int entered;
    if (!entered) {
        PyObject *nothing = PyObject_CallMethod(self, "enter", NULL);
        if (!nothing) {
            return NULL;
        }
        Py_DECREF(nothing);
        entered = 1;
    }
    CUresult failed = CUDA_SUCCESS;
    // a launch waits if the device's queue is full
    Py_BEGIN_ALLOW_THREADS;
    while (at < end && !failed) {
        const Head *head = (const Head *)at;
        const Pointer *pointer = (const Pointer *)(at + sizeof(Head) + 8 * head->parameters);
        memcpy(values, at + sizeof(Head), 8 * head->parameters);
        for (uint64_t i = 0; i < head->pointers; i++, pointer++) {
            values[pointer->parameter] = addresses[pointer->address] + pointer->offset;
        }
        // programmatic dependent launch: it may start before the previous launch has ended
        CUlaunchAttribute pdl = {
            .id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
            .value.programmaticStreamSerializationAllowed = 1,
        };
        CUlaunchConfig config = {
            .gridDimX = head->grid[0], .gridDimY = head->grid[1], .gridDimZ = head->grid[2],
            .blockDimX = head->threads, .blockDimY = 1, .blockDimZ = 1, .sharedMemBytes = head->shared,
            .hStream = (CUstream)addresses[0], .attrs = &pdl, .numAttrs = head->pdl != 0,
        };
        failed = head->launch(&config, head->function, parameters, NULL);
        at = (const char *)pointer;
    }
    Py_END_ALLOW_THREADS;
    if (failed) {
        return PyObject_CallMethod(self, "fail", "i", (int)failed);
    }
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {{"launch", (PyCFunction)(void (*)(void))launch, METH_FASTCALL, NULL}, {0}};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "launches", NULL, -1, methods};

PyMODINIT_FUNC PyInit_launches(void) { return PyModule_Create(&module); }
