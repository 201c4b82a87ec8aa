# SPDX-License-Identifier: Apache-2.0
"""The gateway's web page in headless Chromium, in front of a gateway that is a process of its own."""
