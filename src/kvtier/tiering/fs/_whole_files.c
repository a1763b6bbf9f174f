/* Publishing and reading a whole file with one call, the interpreter's lock released once for all of it.
 *
 * It decides nothing: block_file.py says when and where, and does the same with the calls of Python's os module where
 * this could not be compiled. Five calls of the system move a small block in less time than the interpreter needs to
 * take its lock back after each of them, from an engine that is computing meanwhile.
 *
 * Only Python's stable interface of 3.11 is used, so one compiled module serves later versions too.
 */

#define _GNU_SOURCE
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#define MAX_BUFFERS 8
#define PRIVATE_MODE 0600

/* No number of the system's: it moved nothing more and called that no error. */
#define STOPPED (-1)

/* The memory of a file's parts, kept alive by their views. */
typedef struct {
    int num_views;
    Py_buffer views[MAX_BUFFERS];
    struct iovec parts[MAX_BUFFERS];
    off_t num_bytes;
} Parts;

typedef ssize_t (*Move)(int fd, const struct iovec *parts, int num_parts, off_t offset);

static void release_parts(Parts *parts)
{
    while (parts->num_views > 0)
        PyBuffer_Release(&parts->views[--parts->num_views]);
}

static int add_part(Parts *parts, PyObject *buffer, int view_flags)
{
    Py_buffer *view = &parts->views[parts->num_views];
    if (PyObject_GetBuffer(buffer, view, view_flags) < 0)
        return -1;
    parts->parts[parts->num_views].iov_base = view->buf;
    parts->parts[parts->num_views].iov_len = (size_t)view->len;
    parts->num_bytes += view->len;
    parts->num_views++;
    return 0;
}

/* Takes a view of each buffer in a sequence; on failure an exception is set and nothing is held. */
static int take_parts(Parts *parts, PyObject *buffers, int view_flags)
{
    parts->num_views = 0;
    parts->num_bytes = 0;
    Py_ssize_t num_buffers = PySequence_Size(buffers);
    if (num_buffers < 0)
        return -1;
    if (num_buffers > MAX_BUFFERS) {
        PyErr_Format(PyExc_ValueError, "a file has at most %d parts, not %zd", MAX_BUFFERS, num_buffers);
        return -1;
    }
    for (Py_ssize_t i = 0; i < num_buffers; i++) {
        PyObject *buffer = PySequence_GetItem(buffers, i);
        int failed = buffer == NULL || add_part(parts, buffer, view_flags) < 0;
        Py_XDECREF(buffer);
        if (failed) {
            release_parts(parts);
            return -1;
        }
    }
    return 0;
}

/* Moves every part, in one call unless the system stops early. Returns 0 or what went wrong. */
static int move_all(Move move, int fd, Parts *parts)
{
    struct iovec *part = parts->parts;
    int num_left = parts->num_views;
    off_t offset = 0;
    while (offset < parts->num_bytes) {
        ssize_t moved = move(fd, part, num_left, offset);
        if (moved < 0 && errno == EINTR)
            continue;
        if (moved <= 0)
            return moved < 0 ? errno : STOPPED;
        offset += moved;
        size_t rest = (size_t)moved;
        while (num_left > 0 && rest >= part->iov_len) {
            rest -= part->iov_len;
            part++;
            num_left--;
        }
        if (num_left > 0) {
            part->iov_base = (char *)part->iov_base + rest;
            part->iov_len -= rest;
        }
    }
    return 0;
}

/* An absolute path to what /proc says of the file follows that link; the open file itself needs a capability. */
static int link_open_file(int fd, const char *path)
{
    char proc_path[32];
    snprintf(proc_path, sizeof proc_path, "/proc/self/fd/%d", fd);
    return linkat(AT_FDCWD, proc_path, AT_FDCWD, path, AT_SYMLINK_FOLLOW) < 0 ? errno : 0;
}

static int open_file(const char *path, int flags, mode_t mode)
{
    int fd;
    do
        fd = open(path, flags | O_CLOEXEC, mode);
    while (fd < 0 && errno == EINTR);
    return fd;
}

static void set_mode(int fd, mode_t mode)
{
    int failed;
    do
        failed = fchmod(fd, mode);
    while (failed < 0 && errno == EINTR);
}

/* Some file systems tell only now that they could not keep what was written. */
static int close_written(int fd)
{
    return close(fd) < 0 && errno != EINTR ? errno : 0;
}

static int publish_parts(const char *folder, const char *path, int flags, mode_t mode, Parts *parts)
{
    int fd = open_file(folder, O_RDWR | O_TMPFILE | flags, mode);
    if (fd < 0)
        return errno;
    /* What a umask took away; a file system without modes needs none, so an error of it is none of the block's. */
    if (mode != PRIVATE_MODE)
        set_mode(fd, mode);
    int error = move_all(pwritev, fd, parts);
    if (error == 0)
        error = link_open_file(fd, path);
    if (error != 0) {
        (void)close(fd);
        return error;
    }
    error = close_written(fd);
    if (error != 0)
        (void)unlink(path);
    return error;
}

/* Where this fails the file ``spare`` still has its name. Nothing is written into it while there is no folder for the block:
 * that is made, and this tried again. A link does not take a name that is taken; a rename would. */
static int publish_over(const char *folder, const char *spare, const char *path, int flags, Parts *parts)
{
    if (access(folder, F_OK) < 0)
        return errno;
    int fd = open_file(spare, O_RDWR | O_NOFOLLOW | flags, 0);
    int error = fd < 0 ? errno : move_all(pwritev, fd, parts);
    if (fd >= 0) {
        int error_of_close = close_written(fd);
        error = error == 0 ? error_of_close : error;
    }
    if (error == 0 && link(spare, path) < 0)
        error = errno;
    if (error == 0)
        (void)unlink(spare);
    return error;
}

/* What closing says of a file that was only read is of no use: its bytes are there. */
static int read_parts(const char *path, int flags, Parts *parts, struct stat *status)
{
    int fd = open_file(path, O_RDONLY | O_NOFOLLOW | flags, 0);
    if (fd < 0)
        return errno;
    int error = fstat(fd, status) < 0 ? errno : 0;
    if (error == 0 && status->st_size >= parts->num_bytes)
        error = move_all(preadv, fd, parts);
    (void)close(fd);
    return error;
}

/* Raises OSError; when the system stopped, with the number and the reason that block_file.py gives. */
static PyObject *raise_error(int error, int number_if_stopped, const char *reason_if_stopped, PyObject *path)
{
    if (error != STOPPED) {
        errno = error;
        return PyErr_SetFromErrnoWithFilenameObject(PyExc_OSError, path);
    }
    PyObject *values = Py_BuildValue("isO", number_if_stopped, reason_if_stopped, path);
    if (values != NULL)
        PyErr_SetObject(PyExc_OSError, values);
    Py_XDECREF(values);
    return NULL;
}

/* Returns a path as the system wants it, a new bytes object without a zero in it, or NULL and an exception. */
static PyObject *encode_path(PyObject *path)
{
    PyObject *encoded = PyUnicode_EncodeFSDefault(path);
    char *characters;
    if (encoded != NULL && PyBytes_AsStringAndSize(encoded, &characters, NULL) < 0)
        Py_CLEAR(encoded);
    return encoded;
}

/* True when the file has its name, False when that was taken, else an exception. */
static PyObject *answer_published(int error, PyObject *path)
{
    if (error == 0 || error == EEXIST)
        return PyBool_FromLong(error == 0);
    return raise_error(error, ENOSPC, "the file system took only a part of the block", path);
}

static PyObject *publish(PyObject *module, PyObject *args)
{
    PyObject *folder, *path, *buffers;
    int flags, mode;
    (void)module;
    if (!PyArg_ParseTuple(args, "UUiiO", &folder, &path, &flags, &mode, &buffers))
        return NULL;
    PyObject *folder_bytes = encode_path(folder);
    PyObject *path_bytes = folder_bytes == NULL ? NULL : encode_path(path);
    PyObject *answer = NULL;
    Parts parts;
    if (path_bytes != NULL && take_parts(&parts, buffers, PyBUF_SIMPLE) == 0) {
        const char *folder_name = PyBytes_AsString(folder_bytes), *path_name = PyBytes_AsString(path_bytes);
        int error;
        Py_BEGIN_ALLOW_THREADS
        error = publish_parts(folder_name, path_name, flags, (mode_t)mode, &parts);
        Py_END_ALLOW_THREADS
        release_parts(&parts);
        answer = answer_published(error, path);
    }
    Py_XDECREF(folder_bytes);
    Py_XDECREF(path_bytes);
    return answer;
}

static PyObject *overwrite(PyObject *module, PyObject *args)
{
    PyObject *folder, *spare, *path, *buffers;
    int flags;
    (void)module;
    if (!PyArg_ParseTuple(args, "UUUiO", &folder, &spare, &path, &flags, &buffers))
        return NULL;
    PyObject *folder_bytes = encode_path(folder);
    PyObject *spare_bytes = folder_bytes == NULL ? NULL : encode_path(spare);
    PyObject *path_bytes = spare_bytes == NULL ? NULL : encode_path(path);
    PyObject *answer = NULL;
    Parts parts;
    if (path_bytes != NULL && take_parts(&parts, buffers, PyBUF_SIMPLE) == 0) {
        const char *folder_name = PyBytes_AsString(folder_bytes), *spare_name = PyBytes_AsString(spare_bytes);
        const char *path_name = PyBytes_AsString(path_bytes);
        int error;
        Py_BEGIN_ALLOW_THREADS
        error = publish_over(folder_name, spare_name, path_name, flags, &parts);
        Py_END_ALLOW_THREADS
        release_parts(&parts);
        answer = answer_published(error, path);
    }
    Py_XDECREF(folder_bytes);
    Py_XDECREF(spare_bytes);
    Py_XDECREF(path_bytes);
    return answer;
}

static PyObject *describe(const struct stat *status)
{
    double modified_s = (double)status->st_mtim.tv_sec + 1e-9 * (double)status->st_mtim.tv_nsec;
    return Py_BuildValue("LKKd", (long long)status->st_size, (unsigned long long)status->st_dev,
                         (unsigned long long)status->st_ino, modified_s);
}

static PyObject *read_whole(PyObject *module, PyObject *args)
{
    PyObject *path, *buffers;
    int flags;
    (void)module;
    if (!PyArg_ParseTuple(args, "UiO", &path, &flags, &buffers))
        return NULL;
    PyObject *path_bytes = encode_path(path);
    PyObject *answer = NULL;
    Parts parts;
    if (path_bytes != NULL && take_parts(&parts, buffers, PyBUF_WRITABLE) == 0) {
        const char *path_name = PyBytes_AsString(path_bytes);
        struct stat status;
        int error;
        Py_BEGIN_ALLOW_THREADS
        error = read_parts(path_name, flags, &parts, &status);
        Py_END_ALLOW_THREADS
        release_parts(&parts);
        answer = error == 0 ? describe(&status) : raise_error(error, EIO, "the file ended before its length", path);
    }
    Py_XDECREF(path_bytes);
    return answer;
}

static PyMethodDef methods[] = {
    {"publish", publish, METH_VARARGS, "Write a file without a name and link it; False when the name is taken."},
    {"overwrite", overwrite, METH_VARARGS, "Write over a spare file and give it its name; False when it is taken."},
    {"read", read_whole, METH_VARARGS, "Fill buffers from a file unless it is shorter; return its status."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    .m_base = PyModuleDef_HEAD_INIT,
    .m_name = "_whole_files",
    .m_doc = "Publishing and reading a whole file with one call.",
    .m_size = 0,
    .m_methods = methods,
};

PyMODINIT_FUNC PyInit__whole_files(void)
{
    return PyModule_Create(&definition);
}
