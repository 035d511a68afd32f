-- Carries out all verdicts, and then the steps of the accepted verdicts in their order.
local settle_only = settle

-- The ids of acked jobs, and for each id the verdict that acked the job. By the contract, a verdict's steps come before the
-- next verdict. So if a step of an earlier verdict enqueues an acked id, it must do nothing, because by the contract the old
-- job still existed at that time.
local function acked_ids(answers)
    local acked = {}
    for i = 1, #answers do
        local letter = sub(ARGV[2 * i + 3], 13, 13)
        if sub(answers, i, i) == '1' and (letter == 'a' or letter == 'A') then acked[ARGV[2 * i + 2]] = i end
    end
    return acked
end

local function settle()
    check_types()
    local answers, acked = settle_only(), nil
    local has_refusal = string.find(answers, '0', 1, true)
    is_refused = function(head, id)
        local is_enqueue = sub(head, 1, 1) == 'q'
        if not has_refusal and not is_enqueue then return false end
        local verdict = unpacked('>I2', head, 2)
        if sub(answers, verdict, verdict) ~= '1' then return true end
        if not is_enqueue then return false end
        acked = acked or acked_ids(answers)
        return (acked[id] or 0) > verdict
    end
    carry_out_steps(FIRST_STEP, #ARGUMENTS - 1)
    forward(nil, 0, token .. '\255\255')
    finish_steps()
    return answers
end
