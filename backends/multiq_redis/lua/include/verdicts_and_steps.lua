-- Separates the verdicts, which remain in ARGV, from their steps.
local ARGUMENTS = ARGV
local FIRST_STEP = 4 + 2 * ARGV[#ARGV]
local ARGV = { unpack(ARGV, 1, FIRST_STEP - 1) }
local token = ARGV[2]
