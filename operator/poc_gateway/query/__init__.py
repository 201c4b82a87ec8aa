# SPDX-License-Identifier: Apache-2.0
"""What is stored, for people, programs and the operator: rounds, progress, conflicts, samples, summaries, exports.

What belongs here: reading, and writing what was read in a format that somebody asked for, or to the archive.
What does not: any change of the database but which rounds are archived, and what is still to be sent or was refused
(`poc_gateway.outbox.routes`).
"""
