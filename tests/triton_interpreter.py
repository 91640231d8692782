"""Triton's interpreter, with what it does again at each call of a function of a kernel done once for the kernel."""

import inspect


def prepare_once() -> None:
    """Let functions that a kernel calls find Triton's language as the kernel has prepared it.

    The interpreter puts its own functions in place of `tl.load` and the like, about 200 of them, and does so again for
    each function that a kernel calls: a third of the time of these tests. Nothing is changed where Triton is not
    installed, or has an interpreter of another form.
    """
    try:
        from triton import language
        from triton.runtime import interpreter

        prepare = interpreter._patch_lang
    except (ImportError, AttributeError):
        return

    def is_prepared(kernel):
        modules = [x for x in kernel.__globals__.values() if inspect.ismodule(x) and x in (language, language.core)]
        return not any(language.core.is_builtin(module.load) for module in modules)

    def prepare_if_needed(kernel):
        return None if is_prepared(kernel) else prepare(kernel)

    interpreter._patch_lang = prepare_if_needed
