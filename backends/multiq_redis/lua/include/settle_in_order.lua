-- Carries out each verdict and its steps before the next verdict. The steps end at LAST_STEP.
local settle_all = settle

local function settle()
    check_types()
    local verdicts, answers, at = ARGV, {}, FIRST_STEP
    for i = 4, FIRST_STEP - 1, 2 do
        ARGV = { verdicts[1], verdicts[2], verdicts[3], verdicts[i], verdicts[i + 1] }
        local answer, first = settle_all(), at
        answers[#answers + 1] = answer
        while at <= LAST_STEP and unpacked('>I2', ARGUMENTS[at], 2) == #answers do at = at + 3 end
        if answer == '1' then carry_out_steps(first, at - 1) end
    end
    ARGV = verdicts
    forward(nil, 0, token .. '\255\255')
    finish_steps()
    return table.concat(answers)
end
