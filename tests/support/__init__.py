# SPDX-License-Identifier: Apache-2.0
"""What tests share: `fakes` that misbehave, real `servers`, `builders` of what is sent, `checks` of answers."""
