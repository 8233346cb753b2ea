"""Names of the students without attention that are trained beside pruned ones."""

import re

from distill.errors import InputError
from distill.student.config import StudentConfig


def name_attention_free_students(student: StudentConfig) -> dict[str, str]:
    """Returns name -> spec of each student without attention beside pruned ones: of `cnn,hidden=128`, `cnn-hidden128`.

    Raises:
        InputError: One is listed twice.
    """
    specs = [spec.strip() for spec in student.attention_free.split(";") if spec.strip()]
    names = {re.sub(r"[^\w]+", "-", spec.replace("=", "")): spec for spec in specs}
    if len(names) < len(specs):
        raise InputError(
            f"student.attention_free: expected different students, found one twice in {student.attention_free!r}"
        )
    return names
